"""What cannot work ends train_resnet.py with one line and status 2, on every rank.

More flags are in test_options.py, data in test_datasets.py.
"""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import full_disk
from common import files
from common.launcher import horovodrun, run
from full_disk import FULL, temporary_file
from runs import PROGRAM, RELEASE, TIMEOUT, assert_refused, main, mpirun

FLAGS = ("--dataset", "digits", "--limit-train", "64", "--epochs", "3")


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one rank, interrupted after two of three epochs."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    assert main(*FLAGS, "--output-dir", str(folder), "--stop-after", "2") == (0, [])
    return folder


@pytest.fixture
def copy(stopped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / "run"))


def resumed(folder: Path, *more: str) -> tuple[str, ...]:
    return (*FLAGS, *more, "--output-dir", str(folder), "--resume")


def test_folders_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").touch()
    for folder in (tmp_path / "file" / "run", tmp_path / "run", Path("/proc/run"), FULL / "run"):
        assert_refused((*FLAGS, "--output-dir", str(folder)), str(folder))


def test_a_model_of_a_package_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    flags = (*FLAGS, "--model", "resnet18", "--output-dir", str(tmp_path / "run"))
    assert_refused(flags, "--model resnet18 needs torchvision (", "pip install torchvision")


def test_ranks_that_nothing_connects_do_not_train_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert_refused(FLAGS, "1 rank is connected, but WORLD_SIZE=2 says that 2 were started", "unset WORLD_SIZE")


# What a run goes on from


def test_there_must_be_a_run_to_go_on_with(tmp_path: Path) -> None:
    assert_refused(resumed(tmp_path / "other"), str(tmp_path / "other"), "there is no run")
    assert not (tmp_path / "other").exists()


def as_text(content: bytes) -> Callable[[list[bytes]], None]:
    def replace(lines: list[bytes]) -> None:
        lines[0] = content

    return replace


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (as_text(b"{"), "line 1 is no JSON object"),
        (as_text(b"[" * 100_000), "line 1 is no JSON object"),
        (as_text(b"\xff\xfe\x00"), "line 1 is no JSON object"),
        (as_text(b'{"epoch": 0}'), "line 1 lacks level, bytes_sent"),
        (list.reverse, "line 1 is of epoch 1"),
        (list.pop, "1 of the 2 epochs"),
    ],
)
def test_damaged_metrics(damage: Callable[[list[bytes]], Any], said: str, copy: Path) -> None:
    path = copy / "metrics.jsonl"
    lines = path.read_bytes().splitlines()
    damage(lines)
    path.write_bytes(b"\n".join(lines))
    assert_refused(resumed(copy), str(path), said)


def change(path: Path, action: Callable[[dict], Any]) -> None:
    state = torch.load(path, weights_only=True)
    action(state)
    torch.save(state, path)


@pytest.mark.parametrize(
    ("name", "action", "said"),
    [
        ("epoch-0002.pt", lambda state: state["config"].update(model="resnet14"), "model resnet14 (now resnet8)"),
        ("epoch-0002.rank0.pt", lambda state: state["config"].update(seed=7), "seed 7 (now 0)"),
        ("epoch-0002.rank0.pt", lambda state: state.update(rank=1), "rank 1 (now 0)"),
        ("epoch-0002.pt", lambda state: state.update(epoch=1), "epoch 1 (now 2)"),
        ("epoch-0002.pt", lambda state: state.update(config=None), "no configuration"),
        ("epoch-0002.pt", lambda state: state.update(optimizer={}), "does not fit this run"),
        ("epoch-0002.pt", lambda state: state["controller"].update(bits=9), "Controller.state_dict"),
        ("epoch-0002.rank0.pt", lambda state: state["quantizer"].update(steps=-1), "state_dict"),
        ("epoch-0002.rank0.pt", lambda state: state.update(random=torch.zeros(3)), "does not fit this run"),
    ],
)
def test_checkpoints_of_another_run(name: str, action: Callable[[dict], Any], said: str, copy: Path) -> None:
    change(copy / "checkpoints" / name, action)
    assert_refused(resumed(copy), name.split(".")[0], said)


def test_other_things_in_the_folder_of_checkpoints(copy: Path) -> None:
    """They are passed over, aloud where they have a checkpoint's name, and left alone."""
    folder = copy / "checkpoints"
    files = {"epoch-final.pt", "epoch-0001.backup.pt", "epoch-9998.pt", "epoch-9999.pt"}
    folders = {"epoch-0000.pt", "epoch-0001.rank7.pt", "epoch-9997.pt"}
    for name in files:
        (folder / name).write_bytes(b"garbage")
    for name in folders:
        (folder / name).mkdir()
    assert main(*resumed(copy)) == (0, [])
    kept = {f"epoch-000{epoch}{rank}.pt" for epoch in (2, 3) for rank in ("", ".rank0")}
    assert {path.name for path in folder.iterdir()} == files | folders | kept


@pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("stem", ["epoch-0003", "epoch-0003.rank0"])
def test_a_full_disk(stem: str, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copy / "checkpoints"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    monkeypatch.setattr(files, "NamedTemporaryFile", temporary_file(stem))
    assert_refused(resumed(copy), f"{stem}.pt cannot be written: No space left on device")
    assert {name: (folder / name).read_bytes() for name in before} == before
    assert not (folder / f"{stem}.pt").exists() and not list(folder.glob("*.tmp"))
    monkeypatch.undo()  # there is room again
    assert main(*resumed(copy)) == (0, [])
    assert len((copy / "metrics.jsonl").read_text().splitlines()) == 3


# Several ranks: one line, and nobody waits for a rank that has left.


def assert_one_line(ended: Any, *named: str) -> None:
    lines = [line for line in ended.stdout.splitlines() if "train_resnet.py: error:" in line]
    assert ended.returncode != 0 and len(lines) == 1, ended.stdout
    assert all(part in lines[0] for part in named), lines[0]
    assert f'File "{PROGRAM}"' not in ended.stdout, ended.stdout  # horovodrun --gloo has a traceback of its own


def test_bad_flags_are_said_by_one_rank() -> None:
    ended = mpirun("--levels", "8,4,8")
    assert ended.returncode == 2
    assert_one_line(ended, "--levels: '8,4,8' neither ascends nor descends")


def test_the_file_of_one_rank_is_of_another_model(whole: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(whole, tmp_path / "run"))
    change(copied / "checkpoints" / "epoch-0008.rank1.pt", lambda state: state["config"].update(model="resnet20"))
    flags = [PROGRAM, *RELEASE, "--output-dir", str(copied), "--resume"]
    assert_one_line(run(horovodrun(2, flags, "--gloo"), timeout=TIMEOUT), "resnet20 (now resnet8) (rank 1)")


@pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full")
def test_a_disk_that_is_full_on_one_rank(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    ended = mpirun("epoch-0002.rank1", *FLAGS, "--output-dir", str(tmp_path), program=(full_disk.__file__,))
    assert_one_line(ended, "epoch-0002.rank1.pt cannot be written: No space left on device (rank 1)")
    first = {f"epoch-0001{rank}.pt" for rank in ("", ".rank0", ".rank1")}
    assert {path.name for path in folder.iterdir()} == first | {"epoch-0002.rank0.pt"}
    assert [json.loads(line)["epoch"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [0, 1]
