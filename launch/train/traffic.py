"""What a run sends: counted on every worker, told of all of them together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields

from torch import nn

from hvd_dyncomp import Traffic
from hvd_dyncomp.exchange.topology import Topology
from hvd_dyncomp.transport import ranks
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


def errors_over_ranks(own: Mapping[str, float], model: nn.Module) -> dict[str, float]:
    """``tensor_errors`` of a line of metrics.jsonl, in the model's order. Collective.

    These are means over the ranks that can tell, of squares.
    """
    everybody = gather_json(ranks.transport(), dict(own), "errors")
    names = [name for name, _ in model.named_parameters()]
    known = {name: [errors[name] for errors in everybody if name in errors] for name in names}
    return {name: math.hypot(*some) / math.sqrt(len(some)) for name, some in known.items() if some}
