"""Counts of what a rank sends, by epoch and level, compared with float32.

Bytes are those of the messages themselves: with scales, headers and padding, without what the transport adds (TCP/IP
headers, Horovod's negotiation). In some collectives a rank's share depends on the algorithm. There the count is the
mean over ranks, the same for all bandwidth-optimal algorithms: 2(N-1)/N of the buffer for an allreduce, N-1 times its
own piece for an allgather. Where the bytes go is not counted: `commands.run.leaving` works it out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from hvd_dyncomp.checks import comes_from, finite, integer
from hvd_dyncomp.levels import check_level


def allreduce_bytes(nbytes: float, world_size: int) -> float:
    """Bytes that one of `world_size` ranks sends in a bandwidth-optimal allreduce of `nbytes` bytes."""
    return 2 * (world_size - 1) / world_size * nbytes


@dataclass
class Traffic:
    """What one rank sent; all byte counts are per rank.

    Counts of bytes are floats: in some collectives a rank's share depends on the algorithm, and the mean over ranks is
    counted, which may be no whole number.

    Attributes:
        sent_bytes: everything that this rank sent to other ranks: messages of exchanges, with scales and headers; what
            travels uncompressed; and the handshakes of steps.
        float32_bytes: what the same values would have cost as float32, in an allreduce.
        steps: number of steps.
        seconds: time spent in the exchange. With Horovod: time in `compress` and `decompress`, including the wait for
            their messages, but not the wait for the handshake, which is in `synchronize`. With DDP: time in the
            communication hook and its wait. With an `Averager`: time in `mean_`.
        waited_seconds: time for which this rank could not go on because messages of an exchange had not arrived. It
            contains neither quantizing nor what backward hides. On a GPU: the time from the end of backward's kernels
            until all means are there.

    Raises:
        ValueError: a field is not a finite number of at least 0 (steps: a whole number).

    Examples:
        >>> Traffic(sent_bytes=125, float32_bytes=1000).saved_fraction
        0.875
    """

    sent_bytes: float = 0.0
    float32_bytes: float = 0.0
    steps: int = 0
    seconds: float = 0.0
    waited_seconds: float = 0.0

    def __post_init__(self) -> None:
        integer("steps", self.steps, 0)
        for name in (field.name for field in fields(self) if isinstance(field.default, float)):
            finite(name, getattr(self, name), 0)

    @property
    def saved_fraction(self) -> float:
        """1 - sent / float32; 0 for nothing."""
        return 1 - self.sent_bytes / self.float32_bytes if self.float32_bytes else 0.0

    def __iadd__(self, other: Traffic) -> Traffic:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))
        return self


class Meter:
    """Traffic of one rank, by (epoch, level).

    Epochs are the controller's: an epoch ends when `Controller.step` is called.

    Attributes:
        records: `records[(epoch, bits)]` is the `Traffic` of the steps of that epoch at `bits` bits per value.

    Examples:
        >>> meter = Meter()
        >>> meter.at(0, 4).sent_bytes += 100
        >>> meter.at(1, 8).sent_bytes += 200
        >>> meter.total().sent_bytes
        300.0
        >>> meter
        <Meter: 0 steps, 0.0 MB sent, 0.0% less than float32>
    """

    def __init__(self) -> None:
        self.records: dict[tuple[int, float], Traffic] = {}
        self._since = time.perf_counter()  # the latest call of `waited`
        self._waited_before = 0.0  # in all, at that time

    def __repr__(self) -> str:
        all_of_it = self.total()
        sent, saved = all_of_it.sent_bytes / 1e6, all_of_it.saved_fraction
        than = "less" if saved >= 0 else "more"
        return f"<Meter: {all_of_it.steps} steps, {sent:.1f} MB sent, {abs(saved):.1%} {than} than float32>"

    def at(self, epoch: int, bits: float) -> Traffic:
        """The record of (epoch, bits), created at the first call.

        Raises:
            ValueError: `epoch` is not a whole number from 0, or `bits` is not a level.
        """
        key = integer("epoch", epoch, 0), check_level("bits", bits)
        if key not in self.records:
            self.records[key] = Traffic()
        return self.records[key]

    def epoch(self, epoch: int) -> Traffic:
        """The sum over the levels of one epoch. Raises ValueError if `epoch` is not a whole number from 0."""
        integer("epoch", epoch, 0)
        return self._sum(lambda key: key[0] == epoch)

    def level(self, bits: float) -> Traffic:
        """The sum over the epochs of one level. Raises ValueError if `bits` is not a level."""
        check_level("bits", bits)
        return self._sum(lambda key: key[1] == bits)

    def total(self) -> Traffic:
        """The sum over all records."""
        return self._sum(lambda key: True)

    def waited(self) -> float:
        """The share of the time since the latest call for which this rank was blocked by exchanges, from 0 to 1.

        The first call counts from the time when the quantizer was made. Call it once an epoch, for `LinkAware`: before
        validation, if that takes long, and once more after it, to start anew.
        """
        now, waited = time.perf_counter(), self.total().waited_seconds
        passed, blocked = now - self._since, waited - self._waited_before
        self._since, self._waited_before = now, waited
        return min(max(blocked / passed, 0.0), 1.0) if passed > 0 else 0.0

    def _sum(self, wanted: Callable[[tuple[int, float]], bool]) -> Traffic:
        total = Traffic()
        for key, record in self.records.items():
            if wanted(key):
                total += record
        return total

    def state_dict(self) -> dict[str, list[dict[str, Any]]]:
        """Plain data: "records", a list with one dict per entry."""
        return {
            "records": [{"epoch": epoch, "bits": bits, **asdict(own)} for (epoch, bits), own in self.records.items()]
        }

    def load_state_dict(self, state: Mapping[str, list[dict[str, Any]]]) -> None:
        """Replace everything with what `state_dict()` returned.

        Raises:
            ValueError: `state` is something else; nothing has changed.
        """
        records: dict[tuple[int, float], Traffic] = {}
        with comes_from("Meter.state_dict()", state):
            for row in state["records"]:
                counts = {**row}
                key = integer("epoch", counts.pop("epoch"), 0), check_level("bits", counts.pop("bits"))
                if key in records:
                    raise ValueError(f"epoch and bits must be unique together, got {key} twice")
                records[key] = Traffic(**counts)
        self.records = records
        self._since, self._waited_before = time.perf_counter(), self.total().waited_seconds
