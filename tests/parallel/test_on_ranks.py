"""Runs every file of checks in bodies/ under every launcher; the same checks hold at any world size."""

import pytest
from launchers import run_body

BODIES = [
    *("arithmetic", "auto_level", "gradients", "features", "options", "replicas", "lockstep", "resume", "refusals"),
    "memory",
]
JOBS = [("horovodrun", 2), ("mpirun", 2), ("gloo", 2), ("mpirun", 3), ("mpirun", 4)]
# Where the order of calls matters, so does the launcher, whose collectives end at other times.
LOOPS = ["loops_order", "loops_load", "loops_values"]
LOOP_JOBS = [("mpirun", 2), ("gloo", 2), ("mpirun", 3), ("gloo", 3), ("mpirun", 4)]


@pytest.mark.parametrize(
    ("launcher", "ranks", "body"),
    [(*job, body) for job in JOBS for body in BODIES] + [(*job, body) for job in LOOP_JOBS for body in LOOPS],
)
def test_checks_hold_on_every_rank(body, launcher, ranks):
    # From three ranks on, Horovod's own float32 sums depend on what happened to be fused with what. Two runs are
    # comparable bit by bit only without fusion.
    environment = {"HOROVOD_FUSION_THRESHOLD": "0"} if body in ("resume", "replicas") else {}
    environment["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"  # so that a check may make process sets
    run_body(body, launcher, ranks, **environment)
