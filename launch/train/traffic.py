"""What a run sends: counted on every worker, told of all of them together."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import NamedTuple

from torch import nn

from hvd_dyncomp import Traffic
from hvd_dyncomp.commands.run.leaving import leaving
from hvd_dyncomp.exchange.topology import Topology
from hvd_dyncomp.transport import ranks
from hvd_dyncomp.transport.base import gather_json


def find_hosts() -> Topology:
    """Which ranks share a host, by the names that the quantizer goes by as well. Collective."""
    return Topology.of(gather_json(ranks.transport(), ranks.transport().host, "hosts"))


class Sent(NamedTuple):
    """What this worker has sent so far, in bytes; and the seconds that it was in the exchange.

    Attributes:
        sent, float32: to other workers; the same without compression.
        leaving, float32_leaving: to other hosts.
        seconds: see above.
    """

    sent: float = 0.0
    float32: float = 0.0
    leaving: float = 0.0
    float32_leaving: float = 0.0
    seconds: float = 0.0

    @classmethod
    def of(
        cls, records: Mapping[tuple[int, float], Traffic], topology: Topology, hierarchical: bool | None = None
    ) -> Sent:
        """From a meter's records."""
        rank, total = ranks.transport().rank, cls()
        for (_, bits), traffic in records.items():
            left = leaving(traffic, bits, topology, rank, hierarchical=hierarchical)
            total = total.plus(cls(traffic.sent_bytes, traffic.float32_bytes, *left, traffic.seconds))
        return total

    def plus(self, other: Sent) -> Sent:
        return Sent(*map(operator.add, self, other))

    def since(self, before: Sent) -> Sent:
        return Sent(*map(operator.sub, self, before))

    @property
    def saved_fraction(self) -> float:
        """1 - sent / float32, of what leaves hosts; of everything if there is one host; 0 for nothing."""
        if self.float32_leaving:
            return 1 - self.leaving / self.float32_leaving
        return 1 - self.sent / self.float32 if self.float32 else 0.0


def over_ranks(own: Sent, hosts: int) -> dict[str, float]:
    """The bytes of a line of metrics.jsonl. Collective.

    Workers send different amounts where a bucket does not divide evenly, and so do hosts of different numbers of them.
    So these are means: ``bytes_..._host`` over the hosts, of what all workers of a host sent together, and the others
    over the workers.
    """
    everybody = [Sent(*row) for row in gather_json(ranks.transport(), own._replace(seconds=0.0), "bytes")]
    total, workers = Sent(), len(everybody)
    for one in everybody:
        total = total.plus(one)
    return {
        "hosts": hosts,
        "bytes_sent": total.sent / workers,
        "bytes_float32": total.float32 / workers,
        "bytes_leaving_host": total.leaving / hosts,
        # A difference of sums: what is nothing should be nothing.
        "bytes_staying_on_host": float(round((total.sent - total.leaving) / hosts)),
        "bytes_float32_leaving_host": total.float32_leaving / hosts,
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
