"""What a run sends: counted on every worker, told of all of them together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields

from common import ranks
from hvd_dyncomp import Sent, Traffic
from hvd_dyncomp.exchange.topology import Topology
from hvd_dyncomp.transport.base import gather_json


def find_hosts() -> Topology:
    """Which ranks share a host, by the names that the quantizer goes by as well. Collective."""
    return Topology.of(gather_json(ranks.transport(), ranks.transport().host, "hosts"))


def since(now: Traffic, before: Traffic) -> Traffic:
    """What has been sent from one look at the meter to the next."""
    return Traffic(**{field.name: getattr(now, field.name) - getattr(before, field.name) for field in fields(Traffic)})


def over_ranks(own: Traffic, hosts: int) -> dict[str, float]:
    """The bytes of a line of metrics.jsonl. Collective.

    Workers send different amounts where a bucket does not divide evenly, and so do hosts of different numbers of them.
    So these are means: ``bytes_..._host`` over the hosts, of what all workers of a host sent together, and the others
    over the workers.
    """
    everybody = [Traffic(**row) for row in gather_json(ranks.transport(), {**vars(own), "seconds": 0.0}, "bytes")]
    total = Traffic()
    for traffic in everybody:
        total += traffic
    workers = len(everybody)
    compressed, uncompressed = total.compressed_bytes / workers, total.uncompressed_bytes / workers
    return {
        "hosts": hosts,
        "bytes_sent": compressed + uncompressed,
        "bytes_compressed": compressed,
        "bytes_uncompressed": uncompressed,
        "bytes_float32": total.float32_bytes / workers,
        "bytes_leaving_host": total.leaving_bytes / hosts,
        # A difference of sums: what is nothing should be nothing.
        "bytes_staying_on_host": float(round(total.staying_bytes / hosts)),
        "bytes_float32_leaving_host": total.float32_leaving_bytes / hosts,
        "saved_fraction": total.saved_fraction,
    }


def tensors_over_ranks(
    now: Mapping[str, Sent], before: Mapping[str, Sent], errors: Mapping[str, float], hosts: int
) -> dict[str, dict[str, float]]:
    """``tensor_bytes`` and ``tensor_errors`` of a line of metrics.jsonl. Collective.

    Bytes are those from host to host where there are several, means over the hosts, and otherwise means over workers,
    of what they sent to anybody. Errors are means over the ranks that can tell, of squares.
    """
    key = "leaving_bytes" if hosts > 1 else "sent_bytes"
    own = {name: getattr(sent, key) - getattr(before.get(name, Sent()), key) for name, sent in now.items()}
    everybody = gather_json(ranks.transport(), [own, dict(errors)], "tensors")
    divisor = hosts if hosts > 1 else len(everybody)
    known = {name: [theirs[name] for _, theirs in everybody if name in theirs] for name in everybody[0][0]}
    return {
        "tensor_bytes": {name: sum(bytes_of[name] for bytes_of, _ in everybody) / divisor for name in own},
        "tensor_errors": {name: math.hypot(*some) / math.sqrt(len(some)) for name, some in known.items() if some},
    }
