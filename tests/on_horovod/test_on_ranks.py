"""Runs the files of checks in on_ranks/ on several ranks, under every launcher.

The same checks hold at any world size. To start a job takes as long as many checks, so files share one that want the
same launcher, ranks and environment; when one has failed, those after it are not run.
"""

from typing import NamedTuple

import pytest
from launchers import BODIES, run_bodies

# What a step makes of gradients. First those whose steps all succeed: what a failed one has left on its way must not
# meet another file's.
STEPS = [
    "contract",
    "arithmetic",
    "gradients",
    "devices",
    "optimizer_features",
    "quantizer_options",
    "averager",
    "refusals",
    "lockstep",
]
# What many steps make of a run. First the one that looks at the process's memory, which must have no holes yet in which
# growth would not be seen.
RUNS = ["memory", "resume", "replicas"]
LOOPS = [
    "ranks_in_any_order",
    "clip_skip_freeze",
    "less_momentum",
]
# From three ranks on, Horovod's own float32 sums depend on what happened to be fused with what. Two runs are comparable
# bit by bit only without fusion.
UNFUSED = {"HOROVOD_FUSION_THRESHOLD": "0"}
TWO_HOSTS = {"HVD_DYNCOMP_TEST_HOSTS": "2"}


class Job(NamedTuple):
    """One start of a launcher, and the files whose checks its ranks run."""

    launcher: str
    ranks: int
    bodies: list[str]
    environment: dict[str, str] = {}  # nobody changes it

    def __str__(self) -> str:
        hosts = "-two_hosts" if TWO_HOSTS.items() <= self.environment.items() else ""
        return f"{self.launcher}-{self.ranks}{hosts}-{'+'.join(self.bodies)}"


# Two ranks exchange as a pair, and more of them shard by shard, however many they are. Four are for hosts: hosts.py has
# them without any, too.
JOBS = [
    Job("mpirun", 2, STEPS),
    Job("mpirun", 2, RUNS, UNFUSED),
    Job("mpirun", 2, LOOPS),
]
# The same on other ranks, over other collectives, or compiled.
REPEATED = [
    # What torch makes of the same program does not depend on how many ranks there are.
    Job("mpirun", 2, ["compiled", "defaults"], UNFUSED),
    # Other collectives, which end at other times: where the order of calls matters, so do they.
    Job("gloo", 2, ["contract", "optimizer_features", "refusals", "lockstep"]),
    # As on two hosts of two workers, but for what does not depend on how gradients travel.
    Job("mpirun", 4, STEPS, TWO_HOSTS),
    # These say themselves on which hosts their ranks are.
    Job("mpirun", 4, ["hosts"]),
    Job("mpirun", 3, STEPS),
    Job("mpirun", 3, RUNS, UNFUSED),
    Job("mpirun", 3, LOOPS),
    Job("mpirun", 4, ["resume", "defaults"], UNFUSED | TWO_HOSTS),
    Job("mpirun", 4, ["ranks_in_any_order", "less_momentum"], TWO_HOSTS),
    Job("gloo", 3, ["ranks_in_any_order"]),
]
SECONDS = 1200  # a check that hangs ends its job much sooner


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("job", [*JOBS, *(pytest.param(job, marks=pytest.mark.thorough) for job in REPEATED)], ids=str)
def test_checks_hold_on_every_rank(job):
    made_sets = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}  # so that a check may make process sets
    run_bodies(job.bodies, job.launcher, job.ranks, seconds=SECONDS, **job.environment, **made_sets)


def test_every_file_of_checks_is_run():
    """But for those that other tests run."""
    elsewhere = {"large", "soak", "left_alone", "stall", "controller_alone", "controller_once_more", "horovod_ends"}
    files = {path.stem.removeprefix("test_") for path in BODIES.glob("test_*.py")}
    assert {body for job in (*JOBS, *REPEATED) for body in job.bodies} == files - elsewhere
