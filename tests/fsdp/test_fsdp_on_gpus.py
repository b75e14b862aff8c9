"""FSDP2 on GPUs, over Gloo, where two ranks may share one.

Skipped where there is none; tools/on_gpu.sh runs it where there is, and elsewhere rehearses it with
HVD_DYNCOMP_TEST_DEVICE=cpu.
"""

import os
from pathlib import Path

import pytest
import torch
from torchrun import run_bodies

VARIABLE = "HVD_DYNCOMP_TEST_DEVICE"
SECONDS = 60

pytestmark = pytest.mark.skipif(
    VARIABLE not in os.environ and not torch.cuda.is_available(), reason="torch sees no GPU"
)


@pytest.mark.timeout(SECONDS + 30)
def test_gradients_become_means():
    device = os.environ.get(VARIABLE, "cuda")
    run_bodies([Path(__file__).parent / "on_ranks" / "test_exchange.py"], 2, SECONDS, **{VARIABLE: device})
