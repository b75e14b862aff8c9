"""Gradients that travel uncompressed beside the buckets: one all-reduce for each dtype, once all ranks agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hvd_dyncomp.exchange.source import Source
from hvd_dyncomp.exchange.streams import Streams, streams_of
from hvd_dyncomp.exchange.task import Collectives, Task
from hvd_dyncomp.transport.base import Transport


class Sum(Task[None]):
    """One all-reduce.

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
        super().__init__(transport, self._run())
        self.name, self._gradients, self._factor = name, gradients, factor
        self._sparse = wires[0].is_sparse
        if self._sparse:
            self._flat = wires[0]
        else:
            self._flat = torch.cat([wire.reshape(-1) for wire in wires])
            if self._flat.dtype is torch.float16 and factor < 1:  # its sum may be too large where the mean is not
                self._flat = _shares(self._flat, factor)
                self._factor = 1.0
        self.streams: Streams = streams_of(self._flat.device)
        self._origin: Any = self.streams.origin()
        self.streams.keep(*((self._flat._indices(), self._flat._values()) if self._sparse else (self._flat,)))

    def start(self) -> None:
        """Send: all ranks agree. No effect on later calls."""
        if not self._begun:
            with self.streams.outgoing([self._origin]):
                self.proceed()

    def advance(self) -> bool:
        """As in `Task`, from `start` on."""
        self.start()
        with self.streams.incoming():
            return super().advance()

    def wait(self) -> None:
        """As in `Task`."""
        with self.streams.incoming():
            super().wait()

    @torch.no_grad()
    def _run(self) -> Collectives[None]:
        yield self._transport.sum(self._flat, self.name)
        if self._sparse:
            self._flat *= self._factor
            return
        parts = self._flat.split([*map(_room, self._gradients)])
        for gradient, part in zip(self._gradients, parts, strict=True):
            part *= self._factor
            if gradient.is_complex():
                part = torch.view_as_complex(part.clone().view(-1, 2))  # a view must begin at an even place
            gradient.copy_(part.view(gradient.shape))
        self._gradients = ()


def _shares(values: torch.Tensor, factor: float) -> torch.Tensor:
    """A rank's shares of float16 means, clamped so that sums of finite ones are finite, too.

    Each addition may round up by half a step of the largest values, which is 16.
    """
    limit = torch.finfo(torch.float16).max * factor
    limit = max(limit - 16, limit / 2)
    shares = values * factor
    return torch.where(values.isinf(), shares, shares.clamp(-limit, limit))


def wire_form(gradient: torch.Tensor, transport: Transport) -> torch.Tensor:
    """A gradient as the transport can sum it: contiguous, and as float32 if it takes no such dtype."""
    if gradient.is_floating_point() and not transport.takes(gradient.dtype):
        gradient = gradient.float()
    return gradient.contiguous()


def _room(gradient: torch.Tensor) -> int:
    """How many real values a gradient has."""
    return gradient.numel() * (2 if gradient.is_complex() else 1)


def sums_of(
    source: Source, place: str, wires: Mapping[str, torch.Tensor], gradients: Mapping[str, torch.Tensor]
) -> list[Sum]:
    """The all-reduces of some gradients, in an order that is the same on all ranks, as some transports ask for.

    Args:
        source: of the gradients.
        place: what they have in common: part of the names of collectives.
        wires: what travels in place of each, by parameter's name.
        gradients: by parameter's name.
    """
    alike: dict[str, list[str]] = {}
    for name, wire in wires.items():
        kind = "sparse" if wire.is_sparse else str(_real(wire).dtype).removeprefix("torch.")
        alike.setdefault(f"{kind}.{wire.device.type}", []).append(name)
    return [
        Sum(
            source.transport,
            f"hvd_dyncomp.{source.label}.{place}.{kind}.uncompressed",
            [_real(wires[each]) for each in names],
            [gradients[each] for each in names],
            source.factor,
        )
        for kind, names in alike.items()
    ]


def _real(wire: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(wire.resolve_conj()) if wire.is_complex() else wire
