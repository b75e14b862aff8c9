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
# Again as on two hosts of two workers, but for what does not depend on how gradients travel.
BY_HOST = [body for body in BODIES if body not in ("auto_level", "memory")]
# Those that say themselves on which hosts their ranks are.
PLACED = [("mpirun", 4, "hosts"), ("mpirun", 5, "hosts_in_sets")]


def environment(body: str) -> dict[str, str]:
    # From three ranks on, Horovod's own float32 sums depend on what happened to be fused with what. Two runs are
    # comparable bit by bit only without fusion.
    unfused = {"HOROVOD_FUSION_THRESHOLD": "0"} if body in ("resume", "replicas") else {}
    return {**unfused, "HOROVOD_DYNAMIC_PROCESS_SETS": "1"}  # so that a check may make process sets


@pytest.mark.parametrize(
    ("launcher", "ranks", "body"),
    [(*job, body) for job in JOBS for body in BODIES] + [(*job, body) for job in LOOP_JOBS for body in LOOPS] + PLACED,
)
def test_checks_hold_on_every_rank(body, launcher, ranks):
    run_body(body, launcher, ranks, **environment(body))


@pytest.mark.parametrize(
    ("launcher", "body"),
    [*(("mpirun", body) for body in [*BY_HOST, "loops_values"]), ("gloo", "loops_order"), ("gloo", "loops_load")],
)
def test_checks_hold_on_two_hosts_of_two_ranks(body, launcher):
    run_body(body, launcher, 4, **environment(body), HVD_DYNCOMP_TEST_HOSTS="2")
