"""N ranks in one process, for simulations and for tests: `World`."""

from hvd_dyncomp.simulate.in_process import Deadlock, Ended, InProcessTransport, World
from hvd_dyncomp.simulate.rendezvous import Mismatch

__all__ = ["Deadlock", "Ended", "InProcessTransport", "Mismatch", "World"]
