"""What a run prints comes in whole lines, however it is read."""

import io
import os
import sys
from pathlib import Path

import pytest

from common.launcher import run
from runs import PROGRAM, TIMEOUT
from train.metrics import Progress


class Pieces(io.RawIOBase):
    """Keeps each piece that is written, as a pipe's reader may get it."""

    def __init__(self, *, terminal: bool = False) -> None:
        self.seen: list[str] = []
        self.terminal = terminal

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self.terminal

    def write(self, piece) -> int:
        self.seen.append(bytes(piece).decode())
        return len(piece)


def not_buffered(pieces: Pieces) -> io.TextIOWrapper:
    """As Python makes stdout and stderr under PYTHONUNBUFFERED."""
    return io.TextIOWrapper(pieces, encoding="utf-8", write_through=True)  # type: ignore[type-var]


LINE = {
    **{"epoch": 0, "level": 4, "next_level": 8, "reason": "accuracy above 80 %", "steps_by_level": {"4": 9}},
    **{"train_loss": 1.5, "train_accuracy": 0.5, "val_accuracy": 0.5, "test_accuracy": 0.5, "saved_fraction": 0.86},
    **{"bytes_sent": 4e6, "bytes_leaving_host": 4e6, "bytes_staying_on_host": 0, "bytes_float32": 3e7},
    **{"bytes_float32_leaving_host": 3e7, "hosts": 2, "seconds": 1.0, "seconds_compute": 0.5, "seconds_exchange": 0.5},
}


def watched(monkeypatch) -> list[list[str]]:
    """The pieces of stdout and of stderr, in this order, from now on; a fixture's would make way for pytest's own."""
    both = Pieces(), Pieces()
    monkeypatch.setattr(sys, "stdout", not_buffered(both[0]))
    monkeypatch.setattr(sys, "stderr", not_buffered(both[1]))
    return [pieces.seen for pieces in both]


def test_an_epoch_is_one_piece_and_a_pipe_gets_no_bar(monkeypatch) -> None:
    printed = watched(monkeypatch)
    progress = Progress("auto", 3, rank=0)
    progress.begin(0, steps=9)
    progress.end(LINE)
    assert len(printed[0]) == 1 and printed[0][0].startswith("epoch  1/3   4 bits  loss 1.500")
    assert printed[0][0].endswith(" -> 8 bits (accuracy above 80 %)\n") and printed[1] == []


@pytest.mark.parametrize(
    ("steps", "said"), [({"4": 9}, ""), ({"32": 9}, "9 at 32"), ({"4": 2, "8": 7}, "2 at 4, 7 at 8")]
)
def test_levels_of_steps_are_said_if_they_are_others(steps: dict, said: str, monkeypatch) -> None:
    """In a warm-up."""
    printed = watched(monkeypatch)
    Progress("auto", 3, rank=0).end({**LINE, "steps_by_level": steps})
    assert (f"  steps: {said} bits ->" in printed[0][0]) == bool(said) and ("steps" in printed[0][0]) == bool(said)


@pytest.mark.parametrize(
    ("saved", "said"),
    [(0.86, " (86% saved)"), (-0.001, " (0% saved)"), (-0.03, " (3% more than float32)")],
)
def test_more_than_float32_is_not_said_to_be_saved(saved: float, said: str, monkeypatch) -> None:
    printed = watched(monkeypatch)
    Progress("auto", 3, rank=0).end({**LINE, "saved_fraction": saved})
    assert said in printed[0][0]


def test_what_is_wrong_is_one_piece(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    reader, writer = os.pipe2(os.O_DIRECT)  # keeps pieces apart
    try:
        flags = ["--dataset", "digits", "--output-dir", str(tmp_path / "file" / "run")]
        env = os.environ | {"PYTHONUNBUFFERED": "1"}
        assert run([sys.executable, PROGRAM, *flags], timeout=TIMEOUT, output=writer, env=env).returncode == 2
    finally:
        os.close(writer)
        pieces = [piece.decode() for piece in iter(lambda: os.read(reader, 65536), b"")]
        os.close(reader)
    assert pieces[-1].startswith("train_resnet.py: error: ") and pieces[-1].endswith(": Not a directory\n"), pieces
