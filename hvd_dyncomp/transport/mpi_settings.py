"""What Open MPI is best told. MPI_Init reads it from the environment (docs/benchmarks.md, "Open MPI")."""

from __future__ import annotations

# Horovod's thread asks the other ranks for news every millisecond, and Open MPI polls while it waits; on as many cores
# as workers that takes a third of the time from the arithmetic, unless it yields.
_FEW_CORES = {"OMPI_MCA_mpi_yield_when_idle": "1"}

_OVER_TCP = {
    # By default a large message is put on the socket in one piece. A rank that begins later has its permission to send
    # queued behind the other's message, and what ought to go both ways at once goes one way after the other.
    "OMPI_MCA_btl_tcp_flags": "send",
    # A bucket of 8 MiB at 4 bits is sent at once. Longer messages ask for permission first, which comes when the other
    # rank's thread has its turn; and they are cut into pieces, of which three are under way at a time.
    "OMPI_MCA_btl_tcp_eager_limit": "1310720",
    "OMPI_MCA_btl_tcp_max_send_size": "1310720",
}

DEFAULTS = {**_FEW_CORES, **_OVER_TCP}


def settings(*, few_cores: bool, over_tcp: bool) -> dict[str, str]:
    """Those of `DEFAULTS` that serve a job.

    Args:
        few_cores: hardly more cores than workers.
        over_tcp: it has several hosts, whose messages Open MPI carries.
    """
    return {**(_FEW_CORES if few_cores else {}), **(_OVER_TCP if over_tcp else {})}
