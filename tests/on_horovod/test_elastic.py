"""Hosts come and go under `horovodrun` with a discovery script, and training goes on."""

import sys
from pathlib import Path

import pytest
from launchers import BODIES, run_body, run_limited

from netlab import hosts as netlab

pytestmark = pytest.mark.promise("Elastic Horovod: workers may join and leave, and uncommitted steps leave no trace.")

PROGRAM = Path(__file__).with_name("elastic_program.py")


# By turns, the workers on three hosts, and what is said of size and level at the end of each turn. (The schedule of
# levels is the program's.) "!": the first rank, on the first host, is killed in the middle of a step.
COURSES = {
    "one worker a host": (
        ["1 1 0", "1 0 0", "1 1 1", "1 0 1", "1 1 1", "!0 1 1"],
        "[(2, 4), (1, 2), (3, 8), (2, 32), (3, 1), (2, 4)]",
    ),
    "several": (
        ["2 1 0", "1 0 1", "2 2 2", "!0 2 2"],
        "[(3, 4), (2, 2), (6, 8), (4, 32)]",
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("course", [pytest.param("one worker a host", marks=pytest.mark.soak), "several"])
def test_training_goes_on_through_changes_of_size(course, tmp_path):
    reason = netlab.why_not()
    if reason:
        pytest.skip(reason)
    turns, trace = COURSES[course]
    hosts, script = tmp_path / "hosts", tmp_path / "discover.sh"
    script.write_text(f"#!/bin/sh\ncat {hosts}\n")
    script.chmod(0o755)
    with netlab.hosts(3, workers_per_host=2) as lab:

        def named(turn: str) -> list[str]:
            workers = turn.lstrip("!").split()
            return [f"{name}:{count}" for name, count in zip(lab.addresses, workers, strict=True) if count != "0"]

        hosts.write_text("".join(f"{line}\n" for line in named(turns[0])))
        stages = ["!" * turn.startswith("!") + ",".join(named(turn)) for turn in turns]
        program = [sys.executable, str(PROGRAM), str(hosts), *stages]
        command = lab.command(program, launcher="gloo", discovery=script)
        done = run_limited(command, 240, PYTHONPATH=str(BODIES), HOROVOD_GLOO_TIMEOUT_SECONDS="30")
    assert done.returncode == 0, done.stdout
    assert f"ELASTIC {trace}" in done.stdout, done.stdout


@pytest.mark.thorough
def test_requests_while_horovod_ends_do_not_hang():
    run_body("horovod_ends", "gloo", 2, seconds=60)
