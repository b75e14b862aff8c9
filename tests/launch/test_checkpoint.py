"""Files of a checkpoint: whole or refused. What loading one means to a run is in test_train_runs.py."""

import stat
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import RunError
from train import checkpoint

STATE = {"format": checkpoint.FORMAT, "config": {"seed": 1}, "model": {"weight": torch.arange(1000.0)}}


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "epoch-0003.pt"
    checkpoint._write(STATE, path)
    return path


def test_what_is_written_is_read(written: Path) -> None:
    state = checkpoint.read(written)
    assert state["config"] == {"seed": 1}
    assert torch.equal(state["model"]["weight"], torch.arange(1000.0))
    assert [path.name for path in written.parent.iterdir()] == ["epoch-0003.pt"]


def test_only_its_owner_may_read_it(written: Path) -> None:
    assert stat.S_IMODE(written.stat().st_mode) == 0o600


def test_a_changed_bit_is_noticed(written: Path) -> None:
    """torch itself would load the other weights."""
    content = bytearray(written.read_bytes())
    content[content.index(torch.arange(1000.0).numpy().tobytes()) + 2000] ^= 1
    written.write_bytes(content)
    with pytest.raises(RunError, match="is damaged: .* has changed"):
        checkpoint.read(written)


@given(position=st.integers(0, 10_000), value=st.integers(0, 255))
@settings(max_examples=200, deadline=None)
def test_a_changed_byte_is_noticed_or_harmless(position: int, value: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "epoch-0003.pt"
        checkpoint._write(STATE, path)
        content = bytearray(path.read_bytes())
        content[position % len(content)] = value
        path.write_bytes(content)
        try:
            state = checkpoint.read(path, STATE)
        except RunError:
            return
        assert torch.equal(state["model"]["weight"], torch.arange(1000.0)) and state["config"] == {"seed": 1}


def test_other_files_are_refused(tmp_path: Path) -> None:
    torch.save([1, 2, 3], tmp_path / "list.pt")
    torch.save({"format": 99}, tmp_path / "later.pt")
    for name in ("list.pt", "later.pt"):
        with pytest.raises(RunError, match=name):
            checkpoint.read(tmp_path / name)
    with pytest.raises(RunError, match=r"gone\.pt is missing"):
        checkpoint.read(tmp_path / "gone.pt")


class _Callable:
    def __reduce__(self) -> tuple:
        return (print, ("run by a checkpoint",))


def test_code_in_a_file_does_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"format": checkpoint.FORMAT, "model": _Callable()}, tmp_path / "bad.pt")
    with pytest.raises(RunError, match=r"bad\.pt"):
        checkpoint.read(tmp_path / "bad.pt")
    assert "run by a checkpoint" not in capsys.readouterr().out


def test_another_run_is_named_in_full(tmp_path: Path) -> None:
    checkpoint.compare({"seed": 1, "levels": [4, 8]}, {"seed": 1, "levels": [4, 8]}, tmp_path)
    with pytest.raises(RunError, match=r"model resnet8 \(now resnet20\), world_size 2 \(now 4\)"):
        checkpoint.compare({"model": "resnet8", "world_size": 2}, {"model": "resnet20", "world_size": 4}, tmp_path)


def test_complete_checkpoints_only_are_present(tmp_path: Path) -> None:
    assert checkpoint.present(tmp_path) == []
    for name in ("epoch-0002.pt", "epoch-0010.pt", "epoch-0011.rank0.pt", "epoch-0012.tmp"):
        (tmp_path / name).touch()
    assert checkpoint.present(tmp_path) == [10, 2]


def test_all_but_the_newest_two_go_away(tmp_path: Path) -> None:
    names = [[f"epoch-{finished:04d}{rank}.pt" for rank in ("", ".rank0", ".rank1")] for finished in (1, 2, 3)]
    for name in (*names[0], *names[1], *names[2], "epoch-0002.rank1.k1ll3d.tmp"):
        (tmp_path / name).touch()
    checkpoint._remove_old(tmp_path, 3)
    assert {path.name for path in tmp_path.iterdir()} == {*names[1], *names[2]}
