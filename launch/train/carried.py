"""Which of a run's bytes compression is about, and how they are called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Carried(NamedTuple):
    """What is sent where it costs most: from host to host, or, if all workers are on one host, between them.

    Attributes:
        whose: "from each host": what all its workers send to other hosts, which its network interface carries.
            "per worker": there is one host only.
        sent: in bytes.
        float32: what would have been sent without compression.
        staying: what all workers of a host send among themselves beside that; 0 where there is one host only.
    """

    whose: str
    sent: float
    float32: float
    staying: float

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Carried:
        """From a line of metrics.jsonl, or a summary."""
        float32 = record["bytes_float32_leaving_host"]
        if float32:
            return cls("from each host", record["bytes_leaving_host"], float32, record["bytes_staying_on_host"])
        return cls("per worker", record["bytes_sent"], record["bytes_float32"], 0.0)

    @property
    def share(self) -> float:
        """Sent, in % of float32; 0 where there was nothing to be sent (one worker, or no epoch)."""
        return 100 * self.sent / self.float32 if self.float32 else 0.0

    def in_words(self, against: str) -> str:
        """For a line of a log; ``against``, after the bytes, says what they compare to."""
        if not self.float32:
            return "sent nothing"
        where = self.whose if self.whose == "from each host" else f"{self.whose} within the host"
        beside = f", and {megabytes(self.staying)} MB within it" if self.staying else ""
        return f"sent {megabytes(self.sent)} MB {where}{against}{beside}"


def placement(workers: int, hosts: int) -> str:
    """So many workers on so many hosts, in words."""
    return f"{workers} worker{'s' if workers > 1 else ''} on {hosts} host{'s' if hosts > 1 else ''}"


def megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:.1f}"
