"""The checks that take long: `make soak`."""

import pytest
from launchers import run_body

pytestmark = pytest.mark.soak


@pytest.mark.timeout(3 * 3600)
def test_20000_steps_on_4_ranks():
    print(run_body("soak", "mpirun", 4, seconds=3 * 3600))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.timeout(1800)
def test_200_million_values(ranks):
    print(run_body("large", "mpirun", ranks, seconds=1800))
