"""train_resnet.py from end to end under its launchers, on scikit-learn's digits."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launcher import horovodrun, run
from scenarios import TRAINER

PROGRAM = str(TRAINER)
DIGITS = ("--dataset", "digits", "--model", "resnet8", "--limit-train", "512")
TIMEOUT = 240.0  # seconds; on an idle machine a run takes less than 10

# Nothing but stagnation moves the level: three epochs at 4 bits, two released, three at 4 bits again.
RELEASE = (
    *(*DIGITS, "--epochs", "8", "--levels", "4,8", "--thresholds", "0.999", "--loss-patience", "20"),
    *("--stagnation-patience", "2", "--release-epochs", "2", "--cooldown", "1", "--rounding", "stochastic"),
)
RELEASE_LEVELS = [4, 4, 4, 32, 32, 4, 4, 4]


def train(*flags: str, options: tuple[str, ...] = ()) -> str:
    ended = run(horovodrun(2, [PROGRAM, *flags], *options), timeout=TIMEOUT)
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


def mpirun(*flags: str) -> subprocess.CompletedProcess[str]:
    # Workers on one machine need shared memory only; binding would put both on one core of a small machine.
    command = ["mpirun", "-np", "2", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    return run([*command, sys.executable, PROGRAM, *flags], timeout=TIMEOUT)


def metrics(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith("seconds")} for line in lines]


def same(a: object, b: object) -> bool:
    """Equality of nested plain data with tensors in it, bit for bit; meters' seconds are left out."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(key == "seconds" or same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run through a release that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(*RELEASE, "--output-dir", str(folder))
    return folder


def test_a_run_leaves_metrics_and_a_summary(whole: Path) -> None:
    lines = metrics(whole)
    assert [line["level"] for line in lines] == RELEASE_LEVELS
    assert [line["next_level"] for line in lines[:-1]] == RELEASE_LEVELS[1:]
    assert lines[-1]["test_accuracy"] > 0.8
    for line in lines:
        released = line["level"] == 32
        assert (line["bytes_compressed"] == 0) == released
        assert line["saved_fraction"] == pytest.approx(0 if released else 0.86, abs=0.03)
        assert line["bytes_sent"] == line["bytes_compressed"] + line["bytes_uncompressed"]
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["levels"] == RELEASE_LEVELS
    assert summary["released"]["epochs"] == 2
    assert summary["config"]["world_size"] == 2
    assert 0 < summary["seconds_exchange"] < summary["seconds"]


def test_resume_equals_no_interruption(whole: Path, tmp_path: Path) -> None:
    broken = tmp_path / "run"
    # Once between compressed epochs, once in the middle of the release.
    train(*RELEASE, "--output-dir", str(broken), "--stop-after", "2")
    train(*RELEASE, "--output-dir", str(broken), "--stop-after", "4", "--resume")
    assert not (broken / "summary.json").exists()
    said = train(*RELEASE, "--output-dir", str(broken), "--resume")
    assert "resumed after 4 of 8 epochs, at 32 bits" in said
    assert metrics(broken) == metrics(whole)
    for name in ("epoch-0008.pt", "epoch-0008.rank0.pt", "epoch-0008.rank1.pt"):
        ours, theirs = (torch.load(folder / "checkpoints" / name, weights_only=True) for folder in (broken, whole))
        assert same(ours, theirs), name


def test_residuals_are_each_ranks_own(whole: Path) -> None:
    first, second = (torch.load(whole / f"checkpoints/epoch-0008.rank{rank}.pt", weights_only=True) for rank in (0, 1))
    assert not same(first["quantizer"], second["quantizer"])


@pytest.mark.parametrize("compression", ["none", "fp16"])
def test_horovods_own_compressions(compression: str, tmp_path: Path) -> None:
    options = ("--gloo",) if compression == "fp16" else ()
    train(
        *DIGITS, "--epochs", "2", "--compression", compression, "--output-dir", str(tmp_path / "run"), options=options
    )
    lines = metrics(tmp_path / "run")
    assert [line["saved_fraction"] for line in lines] == [{"none": 0.0, "fp16": 0.5}[compression]] * 2


def test_a_damaged_file_of_one_rank_ends_all(whole: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(whole, copy)
    file = copy / "checkpoints" / "epoch-0008.rank1.pt"
    file.write_bytes(file.read_bytes()[:1000])
    ended = mpirun(*RELEASE, "--output-dir", str(copy), "--resume")
    assert ended.returncode == 2
    said = [line for line in ended.stdout.splitlines() if "train_resnet.py: error:" in line]
    assert len(said) == 1
    assert str(file) in said[0] and "(rank 1)" in said[0]


def test_a_checkpoint_of_another_run_is_refused(whole: Path) -> None:
    # One worker, where the checkpoint has two.
    flags = [*RELEASE, "--batch-size", "32", "--output-dir", str(whole), "--resume"]
    ended = run([sys.executable, PROGRAM, *flags], timeout=TIMEOUT)
    assert ended.returncode == 2
    assert "batch_size 64 (now 32), world_size 2 (now 1)" in ended.stdout.splitlines()[-1]


def test_a_run_is_not_written_over(whole: Path) -> None:
    ended = run([sys.executable, PROGRAM, *RELEASE, "--output-dir", str(whole)], timeout=TIMEOUT)
    assert ended.returncode == 2
    assert f"--output-dir {whole}: holds a run already" in ended.stdout.splitlines()[-1]


def test_an_output_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ended = run([sys.executable, PROGRAM, *DIGITS, "--output-dir", str(tmp_path / "file" / "run")], timeout=TIMEOUT)
    assert ended.returncode == 2
    assert str(tmp_path / "file") in ended.stdout.splitlines()[-1]


def test_a_program_that_hangs_is_ended_with_its_children() -> None:
    sleeper = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    with pytest.raises(subprocess.TimeoutExpired):
        run([sys.executable, "-c", sleeper], timeout=1.0)
