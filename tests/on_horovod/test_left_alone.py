"""After an error within a step on one rank, the job ends with that rank's process."""

import re
import time

import pytest
from launchers import run_body

pytestmark = pytest.mark.promise("When a rank is killed or fails, its launcher ends the job within 30 s.")


@pytest.mark.parametrize(
    ("launcher", "where"), [pytest.param("mpirun", "in a hook", marks=pytest.mark.thorough), ("gloo", "in an exchange")]
)
def test_the_job_ends_with_the_rank(launcher, where):
    with pytest.raises(AssertionError, match="rank 1 ends") as ended:
        run_body("left_alone", launcher, 2, seconds=120, HVD_DYNCOMP_TEST_WHERE=where)
    now = time.time()
    assert "no end after" not in str(ended.value)
    assert (
        now - float(re.search(r"rank 1 ends at (\d+\.\d+)", str(ended.value))[1]) < 30
    )  # seconds; about 2 on a machine with nothing else to do
