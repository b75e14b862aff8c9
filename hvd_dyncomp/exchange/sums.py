"""Gradients that travel uncompressed beside the buckets: one all-reduce for each dtype, once all ranks agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hvd_dyncomp.errors import LockstepError
from hvd_dyncomp.exchange.streams import Streams, streams_of
from hvd_dyncomp.exchange.task import Collectives, Gate, Task
from hvd_dyncomp.transport.base import Transport


class Sum(Task[None]):
    """One all-reduce. A last value tells whether a rank has given up; a sparse tensor has no room for it.

    Args:
        transport, name: of the collective.
        wires: what travels in place of the gradients: real, of one dtype, on one device; or one sparse tensor.
        gradients: get the means, in their own dtype.
        factor: multiplies the sum.

    Attributes:
        name: see above.
        streams: of the device.
    """

    def __init__(
        self,
        transport: Transport,
        name: str,
        wires: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        factor: float,
    ) -> None:
        super().__init__(transport, self._all_of_it())
        self.name, self._gradients, self._factor = name, gradients, factor
        self._sparse = wires[0].is_sparse
        self._agreed = False
        self._status: torch.Tensor | None = None  # on its way from a GPU
        if self._sparse:
            self._flat = wires[0]
        else:
            self._flat = torch.cat([*(wire.reshape(-1) for wire in wires), wires[0].new_zeros(1)])
            if self._flat.dtype is torch.float16:  # whose sum may be too large where the mean is not
                self._flat *= factor
                self._factor = 1.0
        self.streams: Streams = streams_of(self._flat.device)
        self._origin: Any = self.streams.origin()
        self.streams.keep(*((self._flat._indices(), self._flat._values()) if self._sparse else (self._flat,)))

    def is_open(self, gate: Gate) -> bool:
        """As in `Task`."""
        return self._agreed

    def start(self) -> None:
        """Send: all ranks agree. No effect on later calls."""
        if not self._agreed:
            self._agreed = True
            with self.streams.outgoing([self._origin]):
                self.begin()

    def advance(self) -> bool:
        """As in `Task`, from `start` on."""
        self.start()
        with self.streams.incoming():
            return super().advance()

    def wait(self) -> None:
        """As in `Task`."""
        with self.streams.incoming():
            super().wait()

    def conclude(self) -> None:
        """Check that no rank has given up. Call it when all is over and the device has caught up.

        Raises:
            LockstepError: a rank has.
        """
        self.outcome()
        if self._status is not None and float(self._status):
            raise self._given_up()

    def _given_up(self) -> LockstepError:
        return LockstepError(f"{self.name}: a rank gave up this step: its own error says why")

    @torch.no_grad()
    def _all_of_it(self) -> Collectives[None]:
        yield Gate.SEND
        if self._reason is not None and not self._sparse:
            self._flat.zero_()[-1] = 1
        yield self._transport.sum(self._flat, self.name)
        if self._reason is not None:
            raise self._reason
        if self._sparse:
            self._flat *= self._factor
            return
        *parts, status = self._flat.split([*map(_room, self._gradients), 1])
        if self.streams.late:
            self._status = status.to("cpu", non_blocking=True)
        elif float(status):
            raise self._given_up()
        for gradient, part in zip(self._gradients, parts, strict=True):
            part *= self._factor
            if gradient.is_complex():
                part = torch.view_as_complex(part.clone().view(-1, 2))  # a view must begin at an even place
            gradient.copy_(part.view(gradient.shape))
        self._gradients = ()


def _room(gradient: torch.Tensor) -> int:
    """How many real values a gradient has."""
    return gradient.numel() * (2 if gradient.is_complex() else 1)


class Sums:
    """All of one step, in the order in which they are started: the same on all ranks, as some transports ask for.

    Args:
        transport, label, factor: as in `Source`.

    Attributes:
        tasks: see above.
    """

    def __init__(self, transport: Transport, label: str, factor: float) -> None:
        self._transport, self._label, self._factor = transport, label, factor
        self._by_name: dict[str, Sum] = {}
        self._places: set[str] = set()

    def has(self, place: str) -> bool:
        """Whether `add` was called for a place."""
        return place in self._places

    @property
    def tasks(self) -> list[Sum]:
        return list(self._by_name.values())

    def add(
        self,
        place: str,
        wires: Mapping[str, torch.Tensor],
        gradients: Mapping[str, torch.Tensor],
        failure: BaseException | None,
    ) -> None:
        """Take some gradients. Once for each place; again, if it was interrupted.

        Args:
            place: what they have in common: part of the names of collectives.
            wires: what travels in place of each, by parameter's name; of the right dtype and shape, whatever failed.
            gradients: by parameter's name.
            failure: why nobody will have their means, or None. The other ranks hear of it.
        """
        alike: dict[str, list[str]] = {}
        for name, wire in wires.items():
            kind = "sparse" if wire.is_sparse else str(_real(wire).dtype).removeprefix("torch.")
            alike.setdefault(f"{kind}.{wire.device.type}", []).append(name)
        for kind, names in alike.items():
            name = f"hvd_dyncomp.{self._label}.{place}.{kind}.uncompressed"
            if name not in self._by_name:
                reals = [_real(wires[each]) for each in names]
                one = Sum(self._transport, name, reals, [gradients[each] for each in names], self._factor)
                self._by_name[name] = one
            if failure is not None:
                self._by_name[name].cancel(failure)
        self._places.add(place)


def _real(wire: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(wire.resolve_conj()) if wire.is_complex() else wire
