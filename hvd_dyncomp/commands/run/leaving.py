"""How much of what a rank has sent left its host: the meter does not count it, the placement of ranks tells it."""

from __future__ import annotations

from hvd_dyncomp.exchange.topology import Topology, dtype_within_host
from hvd_dyncomp.levels import UNCOMPRESSED
from hvd_dyncomp.meter import Traffic, allreduce_bytes


def leaving(
    sent: Traffic, bits: float, topology: Topology, rank: int, *, hierarchical: bool | None = None
) -> tuple[float, float]:
    """Bytes that left a rank's host, and what would have left it as float32.

    Of an allreduce it is the least possible: 2(H-1)/H of the buffer with H hosts, divided among the host's workers.
    (Gloo's ring sends more than that from hosts of several workers.) Below 32 bits everything counts as compressed, so
    skipped tensors make it an estimate.

    Args:
        sent: of steps at one level.
        bits: that level.
        topology: which ranks share a host.
        rank: whose bytes they are.
        hierarchical: of the quantizer.
    """
    size, hosts, workers = topology.size, len(topology.hosts), len(topology.host_of(rank))
    if hosts == 1:
        return 0.0, 0.0
    between = allreduce_bytes(1, hosts)
    summed = between / workers / allreduce_bytes(1, size)  # of an allreduce
    float32 = sent.float32_bytes * summed
    if bits == UNCOMPRESSED:
        return sent.sent_bytes * summed, float32
    if hierarchical is not None or not topology.two_level:
        return sent.sent_bytes * (size - workers) / (size - 1), float32
    # As `exchange.recipes.by_host` does it: neighbours get values, other hosts codes, then neighbours the result,
    # which of two hosts is what both have sent.
    values = sent.float32_bytes / allreduce_bytes(4, size)
    codes = sent.sent_bytes - values * dtype_within_host(bits).itemsize * (workers - 1) / workers
    handed_on = (workers - 1) * (2 if hosts == 2 else 1)
    return max(codes, 0.0) * between / (between + handed_on), float32
