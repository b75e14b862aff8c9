"""Ranks that do not call `Controller.step` together: who waits says so, and a late rank is harmless."""

import pytest
from launchers import run_body

pytestmark = pytest.mark.promise(
    "A late rank does no harm; who waits for it in `Controller.step` for 10 s logs a warning."
)


@pytest.mark.thorough
@pytest.mark.parametrize(("launcher", "ranks", "alone"), [("mpirun", 3, 0), ("gloo", 2, 1)])
def test_one_rank_is_late_or_early(launcher, ranks, alone):
    run_body("controller_alone", launcher, ranks, HVD_DYNCOMP_TEST_ALONE=str(alone))


@pytest.mark.thorough
@pytest.mark.parametrize("launcher", ["mpirun", "gloo"])
def test_one_rank_calls_it_once_more(launcher):
    run_body("controller_once_more", launcher, 2)
