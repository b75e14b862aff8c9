"""Where the others cannot hear that a rank has left a step, the job ends with that rank."""

import pytest
from launchers import run_body


@pytest.mark.parametrize("launcher", ["mpirun", "gloo"])
def test_the_job_ends_with_the_rank(launcher):
    with pytest.raises(AssertionError, match="rank 1 ends") as ended:
        run_body("left_alone", launcher, 2, seconds=60)
    assert "no end after" not in str(ended.value)
