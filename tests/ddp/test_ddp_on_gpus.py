"""DistributedDataParallel on GPUs, without Horovod. Over Gloo two ranks may share one; NCCL takes one rank a GPU.

Skipped where there is none; tools/on_gpu.sh runs it where there is, and elsewhere rehearses it with
HVD_DYNCOMP_TEST_DEVICE=cpu.
"""

import json
import os
from pathlib import Path

import pytest
import torch
from torchrun import run_bodies, run_program

from common.launcher import TRAINER

VARIABLE = "HVD_DYNCOMP_TEST_DEVICE"
RANKS = 2
SECONDS = 60

pytestmark = pytest.mark.skipif(
    VARIABLE not in os.environ and not torch.cuda.is_available(), reason="torch sees no GPU"
)


@pytest.mark.timeout(SECONDS + 30)
def test_gradients_are_those_of_cpus():
    run_bodies([Path(__file__).parent / "on_ranks" / "test_devices.py"], RANKS, SECONDS)


@pytest.mark.timeout(SECONDS + 30)
def test_training(tmp_path):
    flags = ["--dataset", "digits", "--model", "resnet8", "--limit-train", "512", "--epochs", "4"]
    flags += ["--compression", "static", "--bits", "4", "--device", os.environ.get(VARIABLE, "cuda")]
    flags += ["--output-dir", str(tmp_path / "run")]
    done = run_program(RANKS, TRAINER, *flags, seconds=SECONDS, PYTHONPATH=str(TRAINER.parent))
    assert done.returncode == 0, done.stdout
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    assert last["test_accuracy"] > 0.5 and last["level"] == 4
