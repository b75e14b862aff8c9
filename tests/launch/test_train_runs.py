"""train_resnet.py from end to end under its launchers, on scikit-learn's digits."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from common.launcher import run
from runs import (
    DIGITS,
    RELEASE,
    RELEASE_LEVELS,
    assert_reads_well,
    assert_refused,
    assert_same_checkpoints,
    metrics,
    train,
    train_as_documented,
)


def test_a_run_leaves_metrics_and_a_summary(whole: Path) -> None:
    lines = metrics(whole)
    assert [line["level"] for line in lines] == RELEASE_LEVELS
    assert [line["next_level"] for line in lines[:-1]] == RELEASE_LEVELS[1:]
    assert lines[-1]["test_accuracy"] > 0.8
    for line in lines:
        released = line["level"] == 32
        assert line["saved_fraction"] == pytest.approx(0 if released else 0.86, abs=0.03)
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["levels"] == RELEASE_LEVELS
    assert summary["released"]["epochs"] == 2
    assert summary["config"]["world_size"] == 2
    assert 0 < summary["seconds_exchange"] < summary["seconds"]


def test_resume_equals_no_interruption(whole: Path, interrupted: Path, tmp_path: Path) -> None:
    """In the middle of the release, and with a profile; test_faults.py has interruptions between compressed epochs."""
    assert_reads_well((interrupted / "said").read_text(), epochs=4)
    broken = tmp_path / "run"
    shutil.copytree(interrupted, broken)
    assert not (broken / "summary.json").exists()
    said = train(*RELEASE, "--output-dir", str(broken), "--resume")
    assert "resumed after 4 of 8 epochs, at 32 bits" in said
    assert metrics(broken) == metrics(whole)
    assert_same_checkpoints(broken, whole)


def test_a_policy_that_watches_gradients_resumes_within_its_warm_up(tmp_path: Path) -> None:
    flags = (*DIGITS, "--epochs", "4", "--policy", "critical", "--levels", "2,8", "--level-warmup-steps", "6")
    flags += ("--level-warmup-bits", "16", "--eta", "0.2")
    train(*flags, "--output-dir", str(tmp_path / "whole"))
    lines = metrics(tmp_path / "whole")
    assert [line["steps_by_level"] for line in lines[:2]] == [{"16": 4}, {"8": 2, "16": 2}]
    norms = [line["gradient_norm"] for line in lines]
    assert all(norm > 0 for norm in norms)
    for before, now, line in zip(norms, norms[1:], lines[1:], strict=False):
        assert line["next_level"] == (8 if abs(before - now) >= 0.2 * before else 2)

    broken = str(tmp_path / "broken")
    train(*flags, "--output-dir", broken, "--stop-after", "1")
    train(*flags, "--output-dir", broken, "--resume")
    assert metrics(Path(broken)) == lines


def test_few_bits_leave_the_momentum_of_large_tensors_out_without_a_flag(whole: Path, tmp_path: Path) -> None:
    train(*DIGITS, "--epochs", "1", "--bits", "1/4", "--output-dir", str(tmp_path / "run"))
    for path, bits in (
        (tmp_path / "run" / "checkpoints" / "epoch-0001.pt", 0.25),
        (whole / "checkpoints" / "epoch-0008.pt", 4),
    ):
        saved = torch.load(path, weights_only=True)["optimizer"]
        assert {group["momentum"] for group in saved["param_groups"]} == {0.9}
        for state in saved["state"].values():
            buffer = state["momentum_buffer"]
            assert buffer.any() == (bits == 4 or buffer.numel() < 1024)


def test_horovods_own_compression_over_gloo(tmp_path: Path) -> None:
    """Of float16; without any, test_hosts.py has it."""
    flags = ("--epochs", "2", "--compression", "fp16", "--output-dir", str(tmp_path / "run"))
    assert_reads_well(train_as_documented(*DIGITS, *flags, options=("--gloo",)), epochs=2)
    assert [line["saved_fraction"] for line in metrics(tmp_path / "run")] == [0.5] * 2


def cut(copy: Path, *names: str) -> None:
    for name in names:
        file = copy / "checkpoints" / name
        file.write_bytes(file.read_bytes()[:1000])


def test_a_damaged_file_of_one_rank_takes_all_to_the_checkpoint_before(whole: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(whole, copy)
    cut(copy, "epoch-0008.rank1.pt")
    said = train(*RELEASE, "--output-dir", str(copy), "--resume")
    assert "epoch-0008.rank1.pt is damaged" in said
    assert "resumed after 7 of 8 epochs" in said
    assert metrics(copy) == metrics(whole)
    assert_same_checkpoints(copy, whole)


def test_a_run_is_not_written_over(whole: Path) -> None:
    assert_refused((*RELEASE, "--output-dir", str(whole)), f"--output-dir {whole}: holds a run already")


def test_a_program_that_hangs_is_ended_with_its_children() -> None:
    sleeper = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    with pytest.raises(subprocess.TimeoutExpired):
        run([sys.executable, "-c", sleeper], timeout=1.0)
