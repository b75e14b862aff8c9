"""The exchange of one bucket in one step: what both ways of doing it share.

A gradient is read where autograd left it when the bucket is complete, and the mean is written back there; no copy is
made on the way unless dtype or strides ask for one. Everything is asynchronous and named: nothing here blocks before
`forward` and `deliver` are called, and neither is called inside a backward hook.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from hvd_dyncomp.exchange.buckets import Bucket, Slot
from hvd_dyncomp.exchange.codec import HEADER_BYTES, WIRE_VERSION, Header, Phase, header_tensor, noise_for
from hvd_dyncomp.kernels import Noise
from hvd_dyncomp.transport.base import Transport

Ready = Callable[[Any], bool]  # of a transport's handle: may it be waited for?


class Exchange(ABC):
    """One bucket, one step. Level and step are fixed at its creation: what moves them later does not reach it.

    Args:
        bucket: what travels.
        bits: level, below 32.
        step: number of the step, the same on all ranks.
        factor: what the sum over ranks is multiplied by (1/N for a mean).
        seed: for stochastic rounding; None rounds to nearest.
        transport: who carries the messages.

    Attributes:
        gradients: what has been added, by slot.
        sent_bytes: what this rank sends for the exchange, headers and scales included.
        nonfinite_blocks: blocks of the result that are not finite, because some rank's values were not.
    """

    def __init__(
        self, bucket: Bucket, *, bits: int, step: int, factor: float, seed: int | None, transport: Transport
    ) -> None:
        self._bucket, self._bits, self._step, self._factor = bucket, bits, step, factor
        self._seed, self._transport = seed, transport
        self.gradients: list[torch.Tensor | None] = [None] * len(bucket.slots)
        self._values: list[torch.Tensor] = []
        self._missing = len(bucket.slots)
        self._where = f"bucket {bucket.name}"
        self._format = {"bits": bits, "block_size": bucket.block_size}
        self._outgoing: tuple[torch.Tensor, list[int]] | None = None
        self._started = self._delivered = False
        self._error: Exception | None = None
        self.sent_bytes = self.nonfinite_blocks = 0

    def add(self, slot: Slot, gradient: torch.Tensor, *, at_once: bool) -> None:
        """Takes one parameter's gradient, of any strides and floating dtype.

        Args:
            at_once: with the last one, quantize all; otherwise not before `start`.
        """
        self.gradients[slot.index] = gradient
        self._missing -= 1
        if at_once and not self._missing:
            self._outgoing = self._quantize()

    def start(self) -> None:
        """Sends the first message, with zeros for gradients that have not come. Does nothing the second time.

        Horovod exchanges gradients that stay sparse by itself: they never come.
        """
        if self._started:
            return
        self._started = True
        self._send(*(self._outgoing or self._quantize()))
        self._outgoing = None

    def _quantize(self) -> tuple[torch.Tensor, list[int]]:
        for slot, gradient in zip(self._bucket.slots, self.gradients, strict=True):
            if gradient is None:
                value = torch.zeros(slot.numel, dtype=torch.float32, device=self._bucket.device)
            else:  # both leave a contiguous float32 tensor as it is
                value = gradient.to(torch.float32).contiguous()
            self._values.append(value)
        messages = self._encode()
        self._bucket.keep_residuals()
        return messages

    def advance(self) -> bool:
        """Does what is possible without blocking: starts, when all gradients are in; returns whether it is over.

        May be called in a backward hook: an error is kept for `forward` and `deliver`. Raised in a hook it would reach
        the ranks at different points.
        """
        if self._error is not None or (self._missing and not self._started):
            return False
        try:
            self.start()
            self._move(self._transport.poll)
        except Exception as error:  # noqa: BLE001  # raised again by deliver()
            self._error = error
        return self._delivered

    def forward(self) -> None:
        """Blocks until this rank has sent all that it has to send."""
        self.start()

    def deliver(self) -> None:
        """Blocks until the exchange is over: every gradient that was added now holds the reduced one.

        Raises:
            LockstepError: the ranks disagree about level, step or bucket.
        """
        self.forward()
        if self._error is None:
            self._move(lambda handle: True)
        if self._error is not None:
            raise self._error

    @abstractmethod
    def _encode(self) -> tuple[torch.Tensor, list[int]]:
        """Quantizes `_values`; returns all first messages as one uint8 vector, and their lengths."""

    @abstractmethod
    def _send(self, messages: torch.Tensor, lengths: list[int]) -> None:
        """Starts the first collective, with what `_encode` has returned."""

    @abstractmethod
    def _move(self, ready: Ready) -> None:
        """Does everything whose collective is `ready`, up to `_write_back`."""

    def _write_back(self) -> None:
        """To be called when `_values` hold what was received."""
        for gradient, value in zip(self.gradients, self._values, strict=True):
            if gradient is not None and gradient is not value:
                gradient.copy_(self._representable(value, gradient.dtype))
        self.gradients, self._values, self._delivered = [], [], True

    def _representable(self, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Codes of few bits overshoot: what float16 could hold before is not to become infinite by that.

        A mean of float16 values can always be held. A sum that is more than twice too large for float16 is no
        overshoot, and becomes infinite, as it would uncompressed: gradient scalers rely on it.
        """
        if dtype is not torch.float16:
            return value
        most = torch.finfo(dtype).max
        clipped = value.clamp(-most, most)
        return clipped if self._factor < 1 else torch.where(value.abs() <= 2 * most, clipped, value)

    def _message(self, phase: Phase, counts: list[int]) -> tuple[torch.Tensor, list[torch.Tensor], list[int]]:
        """Room for one message per entry of `counts` (blocks), headers written.

        Returns:
            All messages as one uint8 vector, views of their payloads, their lengths.
        """
        lengths = [self._bucket.message_bytes(count, self._bits) for count in counts]
        buffer = torch.empty(sum(lengths), dtype=torch.uint8, device=self._bucket.device)
        payloads = []
        for count, message in zip(counts, buffer.split(lengths), strict=True):
            message[:HEADER_BYTES] = header_tensor(self._header(phase, count), self._bucket.device)
            payloads.append(message[HEADER_BYTES:])
        return buffer, payloads, lengths

    def _noise(self, phase: Phase) -> Noise | None:
        if self._seed is None:
            return None
        return noise_for(self._seed, self._bucket.rank, self._step, f"{self._bucket.name}/{phase.name}")

    def _header(self, phase: Phase, blocks: int) -> Header:
        return Header(WIRE_VERSION, phase, self._bits, 0, self._bucket.composition, self._step & 0xFFFFFFFF, blocks)

    def _name(self, phase: Phase) -> str:
        return f"hvd_dyncomp.{self._bucket.name}.{phase.name.lower()}"
