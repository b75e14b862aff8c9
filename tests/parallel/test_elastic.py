"""Hosts come and go under `horovodrun` with a discovery script, and training goes on."""

import sys
from pathlib import Path

import pytest
from launchers import BODIES, run_limited

from lab import hosts as netlab

PROGRAM = Path(__file__).with_name("elastic_program.py")


def test_training_goes_on_through_changes_of_size(tmp_path):
    reason = netlab.why_not()
    if reason:
        pytest.skip(reason)
    hosts, script = tmp_path / "hosts", tmp_path / "discover.sh"
    script.write_text(f"#!/bin/sh\ncat {hosts}\n")
    script.chmod(0o755)
    with netlab.hosts(3) as lab:
        one, two, three = lab.addresses
        # "!": the first rank, on host one, is killed in the middle of a step.
        stages = [f"{one},{two}", one, f"{one},{two},{three}", f"{one},{three}", f"{one},{two},{three}"]
        stages.append(f"!{two},{three}")
        hosts.write_text(f"{one}:1\n{two}:1\n")
        program = [sys.executable, str(PROGRAM), str(hosts), *stages]
        command = lab.command(program, launcher="gloo", discovery=script)
        done = run_limited(command, 240, PYTHONPATH=str(BODIES), HOROVOD_GLOO_TIMEOUT_SECONDS="10")
    assert done.returncode == 0, done.stdout
    # Size and level at the end of each stage.
    assert "ELASTIC [(2, 4), (1, 2), (3, 8), (2, 32), (3, 1), (2, 4)]" in done.stdout, done.stdout
