"""What Open MPI is told, unless the environment says otherwise. Read by MPI_Init (docs/benchmarks.md, "Open MPI")."""

from __future__ import annotations

DEFAULTS = {
    # Horovod's thread asks the other ranks for news every millisecond, and Open MPI polls while it waits; on as many
    # cores as workers that takes a third of the time from the arithmetic, unless it yields.
    "OMPI_MCA_mpi_yield_when_idle": "1",
    # By default a large message is put on the socket in one piece. A rank that begins later has its permission to send
    # queued behind the other's message, and what ought to go both ways at once goes one way after the other.
    "OMPI_MCA_btl_tcp_flags": "send",
    # A bucket of 8 MiB at 4 bits is sent at once. Longer messages ask for permission first, which comes when the other
    # rank's thread has its turn; and they are cut into pieces, of which three are under way at a time.
    "OMPI_MCA_btl_tcp_eager_limit": "1310720",
    "OMPI_MCA_btl_tcp_max_send_size": "1310720",
}
