"""Runs every file of checks in bodies/ under every launcher; the same checks hold at any world size."""

import pytest
from launchers import run_body

BODIES = ["arithmetic", "gradients", "replicas", "lockstep", "resume", "refusals"]


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize(
    ("launcher", "ranks"), [("horovodrun", 2), ("mpirun", 2), ("gloo", 2), ("mpirun", 3), ("mpirun", 4)]
)
def test_checks_hold_on_every_rank(body, launcher, ranks):
    run_body(body, launcher, ranks)
