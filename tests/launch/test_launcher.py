"""launcher.py: programs started from Python."""

import horovod.torch as hvd
from launcher import horovodrun, run


def test_a_process_that_has_initialized_mpi_can_still_launch() -> None:
    """MPI leaves variables behind, unseen by os.environ, that make a launcher below it give up."""
    hvd.init()
    ended = run(horovodrun(2, ["-c", "import horovod.torch as hvd; hvd.init(); assert hvd.size() == 2"]), timeout=60)
    assert ended.returncode == 0, ended.stdout
