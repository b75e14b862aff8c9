"""Counts what a worker sends, by epoch and level and by tensor, against what float32 would have sent.

Bytes are those of the messages themselves, with scales, headers and padding, and without what the transport adds
(TCP/IP headers, Horovod's own negotiation). For collectives in which a rank's share depends on the algorithm the
count is the mean over ranks, which all bandwidth-optimal algorithms share: 2(N-1)/N of the buffer for an allreduce,
N-1 times its own piece for an allgather. What leaves a host of an allreduce is what must: 2(H-1)/H of the buffer with H
hosts, divided among the host's workers. (Gloo's ring sends more than that from hosts of several workers.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from hvd_dyncomp.checks import finite, integer, shown
from hvd_dyncomp.levels import check_level

Key = TypeVar("Key")
Value = TypeVar("Value")


def allreduce_bytes(nbytes: float, world_size: int) -> float:
    """Bytes that one of `world_size` workers sends in a bandwidth-optimal allreduce of `nbytes` bytes."""
    return 2 * (world_size - 1) / world_size * nbytes


@dataclass
class Traffic:
    """What one worker sent; all byte counts are per worker.

    Attributes:
        compressed_bytes: messages of exchanges, scales and headers included, and the handshakes of their steps.
        uncompressed_bytes: what travelled as it was: skipped tensors, released epochs with their handshakes, tickets.
        float32_bytes: what the same values would have cost as float32, in Horovod's allreduce.
        compressed_values: gradient values that travelled compressed.
        nonfinite_blocks: blocks (of `block_size` values) that held a NaN or an infinity of some rank; over all steps.
        steps: exchanges.
        seconds: time spent inside `compress` and `decompress`, waiting for what they send included. (The handshake is
            waited for before, in `synchronize`.)
        leaving_bytes: of compressed and uncompressed bytes, those that left the host; the rest stayed on it.
        float32_leaving_bytes: of `float32_bytes`, those that would have left it.

    Raises:
        ValueError: a field is not a finite number of at least 0 (counts: a whole one).

    Examples:
        >>> sent = Traffic(compressed_bytes=100, uncompressed_bytes=25, float32_bytes=1000)
        >>> sent.sent_bytes, sent.saved_fraction
        (125, 0.875)
    """

    compressed_bytes: float = 0.0
    uncompressed_bytes: float = 0.0
    float32_bytes: float = 0.0
    compressed_values: int = 0
    nonfinite_blocks: int = 0
    steps: int = 0
    seconds: float = 0.0
    leaving_bytes: float = 0.0
    float32_leaving_bytes: float = 0.0

    def __post_init__(self) -> None:
        for name in ("compressed_values", "nonfinite_blocks", "steps"):
            integer(name, getattr(self, name), 0)
        for name in (field.name for field in fields(self) if isinstance(field.default, float)):
            finite(name, getattr(self, name), 0)

    @property
    def sent_bytes(self) -> float:
        """Everything this worker sent."""
        return self.compressed_bytes + self.uncompressed_bytes

    @property
    def staying_bytes(self) -> float:
        """What this worker sent to others on its host."""
        return self.sent_bytes - self.leaving_bytes

    @property
    def saved_fraction(self) -> float:
        """1 - sent / float32: of what left the host, if anything did; otherwise of all that was sent; 0 for nothing."""
        if self.float32_leaving_bytes:
            return 1 - self.leaving_bytes / self.float32_leaving_bytes
        return 1 - self.sent_bytes / self.float32_bytes if self.float32_bytes else 0.0

    def __iadd__(self, other: Traffic) -> Traffic:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))
        return self


@dataclass
class Sent:
    """What one worker sent of a tensor.

    Attributes:
        sent_bytes: to anybody.
        leaving_bytes: so much of it as left the host.

    Raises:
        ValueError: a field is not a finite number of at least 0.

    Examples:
        >>> Sent(100.0, 50.0).leaving_bytes
        50.0
    """

    sent_bytes: float = 0.0
    leaving_bytes: float = 0.0

    def __post_init__(self) -> None:
        finite("sent_bytes", self.sent_bytes, 0)
        finite("leaving_bytes", self.leaving_bytes, 0)


class Meter:
    """Traffic of one worker, keyed by (epoch, level), and by (tensor, level).

    Epochs are the controller's: an epoch ends when `Controller.step` is called.

    Attributes:
        records: `records[(epoch, bits)]` is the `Traffic` of the steps of that epoch which ran at `bits` bits.
        tensors: `tensors[(name, bits)]` is what was `Sent` of a tensor, by its parameter's name, in all steps at `bits`
            bits. All small tensors of a bucket have the name of the first one. A message has many tensors; it is
            divided among them as their codes are long. What is no tensor's (handshakes, tickets) is in `records` only.

    Examples:
        >>> meter = Meter()
        >>> meter.at(0, 4).compressed_bytes += 100
        >>> meter.at(1, 8).compressed_bytes += 200
        >>> meter.total().sent_bytes
        300.0
    """

    def __init__(self) -> None:
        self.records: dict[tuple[int, float], Traffic] = {}
        self.tensors: dict[tuple[str, float], Sent] = {}

    def at(self, epoch: int, bits: float) -> Traffic:
        """The record of (epoch, bits), created when it is first asked for.

        Raises:
            ValueError: it is no epoch, counted from 0, or no level.
        """
        key = integer("epoch", epoch, 0), check_level("bits", bits)
        if key not in self.records:
            self.records[key] = Traffic()
        return self.records[key]

    def epoch(self, epoch: int) -> Traffic:
        """The sum over the levels of one epoch. Raises ValueError if it is none."""
        integer("epoch", epoch, 0)
        return self._sum(lambda key: key[0] == epoch)

    def level(self, bits: float) -> Traffic:
        """The sum over the epochs of one level. Raises ValueError if it is none."""
        check_level("bits", bits)
        return self._sum(lambda key: key[1] == bits)

    def total(self) -> Traffic:
        """The sum over everything."""
        return self._sum(lambda key: True)

    def by_tensor(self) -> dict[str, Sent]:
        """The sums over all levels of what is in `tensors`, by name."""
        sums: dict[str, Sent] = {}
        for (name, _), own in self.tensors.items():
            total = sums.setdefault(name, Sent())
            total.sent_bytes += own.sent_bytes
            total.leaving_bytes += own.leaving_bytes
        return sums

    def _sum(self, wanted: Callable[[tuple[int, float]], bool]) -> Traffic:
        total = Traffic()
        for key, record in self.records.items():
            if wanted(key):
                total += record
        return total

    def state_dict(self) -> dict[str, list[dict[str, Any]]]:
        """Plain data: "records" and "tensors", one dict each."""
        return {
            "records": [{"epoch": epoch, "bits": bits, **asdict(own)} for (epoch, bits), own in self.records.items()],
            "tensors": [{"name": name, "bits": bits, **asdict(own)} for (name, bits), own in self.tensors.items()],
        }

    def load_state_dict(self, state: Mapping[str, list[dict[str, Any]]]) -> None:
        """Replaces everything with what `state_dict()` has returned.

        Raises:
            ValueError: `state` is something else; nothing has changed then.
        """
        try:
            records = _table(state["records"], "epoch", lambda epoch: integer("epoch", epoch, 0), Traffic)
            tensors = _table(state["tensors"], "name", _name, Sent)
        except Exception as error:  # a file may contain anything
            cause = f"{type(error).__name__}: {error}"
            raise ValueError(f"state must come from Meter.state_dict(), got {shown(state)}: {cause}") from error
        self.records, self.tensors = records, tensors


def _table(
    rows: Iterable[Mapping[str, Any]], of: str, checked: Callable[[Any], Key], kind: Callable[..., Value]
) -> dict[tuple[Key, float], Value]:
    """Rows of a state, by what they have under `of`, checked, and by level."""
    table: dict[tuple[Key, float], Value] = {}
    for row in rows:
        counts = {**row}
        key = checked(counts.pop(of)), check_level("bits", counts.pop("bits"))
        if key in table:
            raise ValueError(f"{of} and bits must be unique together, got {key} twice")
        table[key] = kind(**counts)
    return table


def _name(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"name must be a string, got {shown(value)}")
    return value
