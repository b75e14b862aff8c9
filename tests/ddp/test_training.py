"""launch/train_resnet.py under torchrun, where there is no Horovod."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torchrun import run_program

from common.launcher import TRAINER
from train import data

SECONDS = 240
DIGITS = ("--dataset", "digits", "--model", "resnet8", "--limit-train", "512", "--epochs", "4")


def train(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    program = Path(TRAINER)
    flags = (*DIGITS, "--output-dir", str(folder), *flags)
    return run_program(2, program, *flags, seconds=SECONDS, PYTHONPATH=str(program.parent))


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def model(folder: Path) -> dict:
    return torch.load(folder / "checkpoint.pt", weights_only=True)["model"]


@pytest.mark.timeout(3 * SECONDS)
def test_a_run_is_resumed_bit_for_bit_and_reported(tmp_path):
    """With levels that move, one of them below the line at which momentum is left out."""
    ladder = ("--policy", "schedule", "--schedule", "0:4,1:1/4,3:8")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert (done := train(whole, *ladder)).returncode == 0, done.stdout
    assert (done := train(parts, *ladder, "--stop-after", "2")).returncode == 0, done.stdout
    done = train(parts, *ladder, "--resume")
    assert done.returncode == 0 and "resumed after 2 of 4 epochs" in done.stdout, done.stdout

    assert "Warning" not in done.stdout
    assert [line["level"] for line in lines(whole)] == [4, 0.25, 0.25, 8]
    assert lines(whole)[-1]["test_accuracy"] > 0.5
    for line in lines(whole):
        assert line["bytes_sent"] > 0 and line["seconds_exchange"] > 0
    assert lines(whole)[1]["bytes_sent"] < 0.25 * lines(whole)[0]["bytes_sent"]
    scores = [(line["train_loss"], line["test_loss"], line["bytes_sent"]) for line in lines(whole)]
    assert [(line["train_loss"], line["test_loss"], line["bytes_sent"]) for line in lines(parts)] == scores
    ours, theirs = model(whole), model(parts)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours | theirs)

    page = tmp_path / "report.html"
    subprocess.run([sys.executable, "-P", "-m", "hvd_dyncomp", "report", str(whole), "--output", str(page)], check=True)
    assert "whole" in page.read_text(encoding="utf-8")


@pytest.mark.thorough
def test_no_warning_is_about_the_model(tmp_path):
    """The strides of the first convolution's gradient, of grey images of this size."""
    if data.best_present(tmp_path) != "fashion-mnist":
        pytest.skip("there is no Fashion-MNIST")
    images = ("--dataset", "fashion-mnist", "--data-dir", str(tmp_path), "--limit-train", "256", "--val-size", "200")
    done = train(tmp_path / "run", *images, "--epochs", "1")
    assert done.returncode == 0 and "Warning" not in done.stdout, done.stdout


@pytest.mark.thorough
@pytest.mark.timeout(SECONDS)
def test_torchs_own_compression_and_a_flag_that_is_wrong(tmp_path):
    assert (done := train(tmp_path / "run", "--compression", "fp16")).returncode == 0, done.stdout
    assert [line["saved_fraction"] for line in lines(tmp_path / "run")] == [0.5] * 4
    done = train(tmp_path / "run")
    assert done.returncode != 0
    assert done.stdout.count("holds a run already") == 1, done.stdout
