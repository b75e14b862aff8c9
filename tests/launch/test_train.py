"""train_resnet.py from end to end under Horovod's launchers, on scikit-learn's digits; test_faults.py kills it."""

import gzip
import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from common.launcher import horovodrun, run
from runs import (
    DIGITS,
    PROGRAM,
    RELEASE,
    RELEASE_LEVELS,
    TIMEOUT,
    assert_reads_well,
    assert_refused,
    assert_same_runs,
    checkpoint,
    main,
    metrics,
    mpirun,
    train,
    train_as_documented,
)

ALONE = ("--dataset", "digits", "--limit-train", "64", "--epochs", "2")  # for a rank in this process
STEPS = 4  # of an epoch of RELEASE


def test_a_run_leaves_metrics_and_a_summary(whole: Path) -> None:
    lines = metrics(whole)
    assert [line["level"] for line in lines] == RELEASE_LEVELS
    assert [line["next_level"] for line in lines[:-1]] == RELEASE_LEVELS[1:]
    assert lines[-1]["test_accuracy"] > 0.8
    for line, before in zip(lines, (4, *RELEASE_LEVELS), strict=False):
        delivers = 0.5 / STEPS if before != 32 else 0  # what residuals hold: the first step at 32 bits is sent at 16
        assert line["saved_fraction"] == pytest.approx(delivers if line["level"] == 32 else 0.86, abs=0.03)
        assert line["saved_fraction"] == pytest.approx(1 - line["bytes_sent"] / line["bytes_float32"])
        assert line["tensor_errors"].keys() >= {"stage1.0.conv1.weight", "stage3.0.conv2.weight"}
        assert all(0.01 < error < 0.5 or line["level"] == 32 for error in list(line["tensor_errors"].values())[:-1])
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["levels"] == RELEASE_LEVELS and summary["released"]["epochs"] == 2
    assert summary["config"]["world_size"] == 2
    assert 0 < summary["seconds_exchange"] < summary["seconds"]


def test_resume_equals_no_interruption(whole: Path, interrupted: Path, tmp_path: Path) -> None:
    """In the middle of the release, and with a profile; test_faults.py has interruptions between compressed epochs."""
    assert_reads_well((interrupted / "said").read_text(), epochs=4)
    assert not (interrupted / "summary.json").exists()
    folder = Path(shutil.copytree(interrupted, tmp_path / "run"))
    assert "resumed after 4 of 8 epochs" in train(*RELEASE, "--output-dir", str(folder), "--resume")
    assert_same_runs(folder, whole)


@pytest.mark.thorough
def test_few_bits_leave_the_momentum_of_large_tensors_out_without_a_flag(whole: Path, tmp_path: Path) -> None:
    train(*DIGITS, "--epochs", "1", "--bits", "1/4", "--output-dir", str(tmp_path / "run"))
    for folder, bits in ((tmp_path / "run", 0.25), (whole, 4)):
        saved = checkpoint(folder)["optimizer"]
        assert {group["momentum"] for group in saved["param_groups"]} == {0.9}
        for state in saved["state"].values():
            buffer = state["momentum_buffer"]
            assert buffer.any() == (bits == 4 or buffer.numel() < 1024)


@pytest.mark.thorough
def test_horovods_own_compression_over_gloo(tmp_path: Path) -> None:
    flags = ("--epochs", "2", "--compression", "fp16", "--output-dir", str(tmp_path / "run"))
    assert_reads_well(train_as_documented(*DIGITS, *flags, options=("--gloo",)), epochs=2)
    assert [line["saved_fraction"] for line in metrics(tmp_path / "run")] == [0.5] * 2


def test_the_exchange_is_seen_beside_forward_backward_and_update(interrupted: Path) -> None:
    """In the profile of two steps, of all threads."""
    with gzip.open(interrupted / "profile.json.gz") as file:
        events = json.load(file)["traceEvents"]
    for name in ("forward", "backward", "synchronize", "update", "hvd_dyncomp.encode", "hvd_dyncomp.decode"):
        assert len([event for event in events if event["name"] == name]) == 2, name
    assert any(event.get("cat") == "cpu_op" and event["name"] == "aten::convolution" for event in events)


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_tensorboard_has_every_epoch_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    flags = (*ALONE, "--tensorboard", "--output-dir", str(tmp_path))
    assert main(*flags, "--stop-after", "1") == (0, [])
    assert main(*flags, "--resume") == (0, [])
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    found = [(one.step, one.value) for one in events.Scalars("test/test_accuracy")]
    assert found == [(line["epoch"] + 1, pytest.approx(line["test_accuracy"])) for line in metrics(tmp_path)]


# What cannot work ends the program with one line and status 2, on every rank. Options are in test_options.py.


def test_a_run_is_not_written_over(whole: Path) -> None:
    assert_refused((*RELEASE, "--output-dir", str(whole)), f"--output-dir {whole}: holds a run already")


def test_folders_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert_refused((*ALONE, "--output-dir", str(tmp_path / "file" / "run")), str(tmp_path / "file" / "run"))


def test_ranks_that_nothing_connects_do_not_train_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert_refused(ALONE, "1 rank is connected, but WORLD_SIZE=2 says that 2 were started", "unset WORLD_SIZE")


def test_without_tensorboard_one_line_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    assert_refused((*ALONE, "--tensorboard", "--output-dir", str(tmp_path / "run")), "pip install tensorboard")


def test_epochs_that_are_too_short_for_a_profile(tmp_path: Path) -> None:
    assert_refused((*ALONE, "--profile", "--output-dir", str(tmp_path / "run")), "--profile", "they have 1")


@pytest.mark.parametrize("how", ["another model", "cut", "no checkpoint"])
def test_checkpoints_that_nothing_can_go_on_from(how: str, tmp_path: Path) -> None:
    assert main(*ALONE, "--output-dir", str(tmp_path), "--stop-after", "1") == (0, [])
    path, flags = tmp_path / "checkpoint.pt", (*ALONE, "--output-dir", str(tmp_path), "--resume")
    if how == "another model":
        assert_refused((*flags, "--model", "resnet14"), str(path), "model resnet8 (now resnet14)")
    else:
        path.write_bytes(path.read_bytes()[:1000] if how == "cut" else b"")
        assert_refused(flags, f"{path} is damaged")


class _Callable:
    def __reduce__(self) -> tuple:
        return (print, ("run by a checkpoint",))


def test_code_in_a_checkpoint_does_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"model": _Callable()}, tmp_path / "checkpoint.pt")
    assert_refused((*ALONE, "--output-dir", str(tmp_path), "--resume"), "checkpoint.pt is damaged")
    assert "run by a checkpoint" not in capsys.readouterr().out


@pytest.mark.thorough
@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun over Gloo"])
def test_what_is_wrong_is_said_by_one_rank(launcher: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    if launcher == "mpirun":
        flags, named = ["--levels", "8,4,8"], "argument --levels: '8,4,8' neither ascends nor descends"
        ended = mpirun(*flags)
    else:
        flags, named = [*ALONE, "--output-dir", str(tmp_path / "file" / "run")], "Not a directory (rank 0)"
        ended = run(horovodrun(2, [PROGRAM, *flags], "--gloo"), timeout=TIMEOUT)
    lines = [line for line in ended.stdout.splitlines() if "train_resnet.py: error:" in line]
    assert ended.returncode != 0 and len(lines) == 1 and lines[0].endswith(named), ended.stdout
    assert f'File "{PROGRAM}"' not in ended.stdout, ended.stdout  # horovodrun --gloo has a traceback of its own
