"""Hosts come and go under `horovodrun` with a discovery script, and training goes on."""

import sys
from pathlib import Path

import netlab
import pytest
from launchers import BODIES, run_limited

PROGRAM = Path(__file__).with_name("elastic_program.py")


def test_training_goes_on_through_changes_of_size(tmp_path):
    reason = netlab.why_not()
    if reason:
        pytest.skip(reason)
    with netlab.hosts(3) as lab:
        one, two, three = lab.addresses
        stages = [(one, two), (one,), (one, two, three), (one, three)]
        hosts, script = tmp_path / "hosts", tmp_path / "discover.sh"
        hosts.write_text("".join(f"{host}:1\n" for host in stages[0]))
        script.write_text(f"#!/bin/sh\ncat {hosts}\n")
        script.chmod(0o755)
        program = [sys.executable, str(PROGRAM), str(hosts), *(",".join(stage) for stage in stages)]
        command = lab.command(program, launcher="gloo", discovery=script)
        done = run_limited(command, 240, PYTHONPATH=str(BODIES))
    assert done.returncode == 0, done.stdout
    # Size and level at the end of each stage; what was lost in the first is decided again.
    assert "ELASTIC [(2, 4), (1, 2), (3, 8), (2, 32)]" in done.stdout, done.stdout
