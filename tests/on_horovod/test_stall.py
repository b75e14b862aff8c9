"""What Horovod's stall inspector says about our collectives can be understood."""

import pytest
from launchers import run_body

pytestmark = pytest.mark.promise(
    "A late rank does no harm; who waits for it in `Controller.step` for 10 s logs a warning."
)


@pytest.mark.thorough
def test_the_warning_names_exchange_and_bucket():
    # Without the cache of negotiated names: what is in it is only looked at after a minute.
    run_body("stall", "mpirun", 3, HOROVOD_STALL_CHECK_TIME_SECONDS="2", HOROVOD_CACHE_CAPACITY="0")
