"""launcher.py: programs started from Python."""

import os
import sys
from pathlib import Path

import pytest

from common import launcher

PROGRAM = """
import horovod.torch as hvd
from common.launcher import horovodrun, run
hvd.init()
ended = run(horovodrun(2, ["-c", "import horovod.torch as hvd; hvd.init(); assert hvd.size() == 2"]), timeout=60)
assert ended.returncode == 0, ended.stdout
"""


@pytest.mark.thorough
def test_a_process_that_has_initialized_mpi_can_still_launch() -> None:
    """MPI leaves variables behind, unseen by os.environ, that make a launcher below it give up."""
    # In a process of its own: what it leaves behind would reach every program that a later test starts.
    environment = {**os.environ, "PYTHONPATH": str(Path(launcher.__file__).parents[1])}
    ended = launcher.run([sys.executable, "-c", PROGRAM], timeout=90, env=environment)
    assert ended.returncode == 0, ended.stdout
