"""The files of checks that train, with what is trained on GPUs. Over Gloo: two ranks may share one, without MPI.

Skipped where there is none; tools/on_gpu.sh runs them where there is, and elsewhere rehearses them with
HVD_DYNCOMP_TEST_DEVICE=cpu.
"""

import os

import horovod.torch as hvd
import pytest
import torch
from launchers import run_bodies
from test_on_ranks import UNFUSED

VARIABLE = "HVD_DYNCOMP_TEST_DEVICE"  # on_ranks/problem.py
DEVICE = os.environ.get(VARIABLE, "cuda")
RANKS = 2
JOBS = [
    (["devices", "optimizer_features", "quantizer_options"], {}),
    (["ranks_in_any_order", "clip_skip_freeze", "less_momentum"], {}),
    (["resume", "replicas"], UNFUSED),
]
SECONDS = 230

pytestmark = [
    pytest.mark.skipif(VARIABLE not in os.environ and not torch.cuda.is_available(), reason="torch sees no GPU"),
    pytest.mark.skipif(
        DEVICE == "cuda" and hvd.nccl_built() and torch.cuda.device_count() < RANKS, reason="NCCL wants a GPU a rank"
    ),
]


@pytest.mark.timeout(SECONDS + 30)
@pytest.mark.parametrize(("bodies", "environment"), JOBS, ids=lambda value: "+".join(value))
def test_checks_hold_on_every_rank(bodies, environment):
    own = {VARIABLE: DEVICE, "HOROVOD_DYNAMIC_PROCESS_SETS": "1"}
    run_bodies(bodies, "gloo", RANKS, seconds=SECONDS, **environment, **own)
