"""Recommended settings of Open MPI. MPI_Init reads them from the environment (docs/horovod.md, "Open MPI")."""

from __future__ import annotations

# Horovod's thread contacts the other ranks every millisecond, and Open MPI polls while it waits. With as many workers
# as cores that takes a third of the computing time, unless Open MPI yields.
_FEW_CORES = {"OMPI_MCA_mpi_yield_when_idle": "1"}

_OVER_TCP = {
    # By default a large message is put on the socket in one piece. If a rank starts later, its permission to send is
    # queued behind the other rank's message, and the two directions run one after the other instead of at once.
    "OMPI_MCA_btl_tcp_flags": "send",
    # With this limit a bucket of 8 MiB at 4 bits is sent at once. Longer messages wait for a permission, which the
    # other rank's thread gives when it runs next, and are cut into pieces, of which three are in flight at a time.
    "OMPI_MCA_btl_tcp_eager_limit": "1310720",
    "OMPI_MCA_btl_tcp_max_send_size": "1310720",
}

DEFAULTS = {**_FEW_CORES, **_OVER_TCP}


def settings(*, few_cores: bool, over_tcp: bool) -> dict[str, str]:
    """The settings in `DEFAULTS` that help a job.

    Args:
        few_cores: the job has hardly more cores than workers.
        over_tcp: the job has several hosts, and Open MPI carries messages between them.
    """
    return {**(_FEW_CORES if few_cores else {}), **(_OVER_TCP if over_tcp else {})}
