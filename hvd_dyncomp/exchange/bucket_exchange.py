"""The exchange of one bucket in one step.

The exchange reads the gradients where autograd left them, and writes the means to the same memory: at once if nothing
else owns that memory, otherwise when all gradients of the step have been read. It copies a gradient only if its dtype
or strides require it. All collectives are asynchronous and named. Only `wait` blocks, and a backward hook calls it only
for collectives that have completed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hvd_dyncomp.exchange import recipes
from hvd_dyncomp.exchange.buckets import Bucket
from hvd_dyncomp.exchange.memory import are_sole_owners
from hvd_dyncomp.exchange.messages import Messages
from hvd_dyncomp.exchange.slots import Slot
from hvd_dyncomp.exchange.source import Source
from hvd_dyncomp.exchange.task import Collectives, Gate, Task
from hvd_dyncomp.ranges import marked

_MOST_FLOAT16 = torch.finfo(torch.float16).max


class BucketExchange(Task[None]):
    """The exchange of one bucket in one step.

    Args:
        bucket: the parameters.
        source: of the gradients.
        bits: level, below 32.
        step: number of the step, the same on all ranks.

    Attributes:
        bucket: see above.
        gradients: the gradients added so far, by slot. Their memory receives the means.
        complete: whether all gradients have been added. Then `prepare` makes the first messages, and `start` sends them
            once all ranks agree; `received` is True when nothing is in flight, `over` when the means are written.
        error: as in `Task`.
    """

    def __init__(self, bucket: Bucket, source: Source, *, bits: float, step: int) -> None:
        super().__init__(source.transport, self._run())
        self.bucket, self._factor, self._streams = bucket, source.factor, bucket.streams
        self._messages = Messages(bucket, bits, step, source.transport)
        self.gradients: list[torch.Tensor | None] = [None] * len(bucket.slots)
        self.complete = False
        self._missing = set(range(len(bucket.slots)))
        self._started = False
        self._origins: set[Any] = set()
        self._may_write = source.own_memory
        self._sole_owners: bool | None = None  # None: not asked yet

    def add(self, slot: Slot, gradient: torch.Tensor | None) -> None:
        """Add one parameter's gradient, of any strides and floating dtype. Adding it again changes nothing.

        Args:
            gradient: None if no rank has one: zeros are sent, and nothing is written.
        """
        if slot.index in self._missing:
            self._origins.add(self._streams.origin())
            self.gradients[slot.index] = gradient
            self._missing.discard(slot.index)
            self.complete = not self._missing

    def prepare(self) -> None:
        """Make the first messages, if `start` or an earlier call has not. No effect on later calls."""
        if not self._begun:
            with self._streams.outgoing(self._origins):
                self.proceed()

    def relocate(self, places: Mapping[int, torch.Tensor]) -> None:
        """Replace gradients by tensors with the same values, by `id` of the gradient."""
        self.gradients = [places.get(id(gradient), gradient) for gradient in self.gradients]

    def start(self) -> None:
        """Send the first message, with zeros for missing (sparse) gradients. No effect on later calls."""
        if not self._started:
            self.prepare()
            self._started = True
            with self._streams.outgoing(()):  # the stream that made the messages; it need not wait for later gradients
                self.proceed()

    @property
    def sent_bytes(self) -> int:
        """The bytes that this rank has sent to other ranks."""
        return sum(group.sent_bytes for group in self._messages.groups)

    def advance(self) -> bool:
        """Advance without blocking, once all gradients are added; return whether the exchange is over.

        Backward hooks call this, so an error is stored in `error`: raised in a hook, it would leave the ranks at
        different points of their programs.
        """
        if self.complete or self._started:
            self.start()
            with self._streams.incoming():
                super().advance()
        return self.over

    @property
    def over(self) -> bool:
        """Whether all means are written, or there is an error."""
        return self._started and self.done

    @property
    def received(self) -> bool:
        """Whether all gradients have been read and nothing is in flight. There may be means to `write`."""
        return self._started and (self.done or self.gate is Gate.WRITE)

    def write(self) -> None:
        """Write the means. Call it when every gradient of the step has been read. No effect on later calls."""
        self._may_write = True
        if self.gate is Gate.WRITE:
            with self._streams.incoming():
                self.proceed()

    def wait(self) -> None:
        """Block until the collective in flight is over, and do all that is possible then."""
        with self._streams.incoming():
            super().wait()

    @marked("wait")
    def receive(self, handle: Any) -> torch.Tensor:
        """As in `Task`."""
        received = super().receive(handle)
        self._streams.keep(received)
        return received

    def conclude(self) -> None:
        """Check headers on the host, once the exchange is over and the device has caught up."""
        if self.error is not None:
            return
        try:
            self._messages.read()
        except Exception as error:  # noqa: BLE001  # raised by the step
            self.error = error

    def is_open(self, gate: Gate) -> bool:
        """As in `Task`."""
        if gate is Gate.SEND:
            return self._started
        if self._sole_owners is None and not self._may_write:
            self._sole_owners = are_sole_owners(self.gradients)
        return self._may_write or bool(self._sole_owners)

    def _run(self) -> Collectives[None]:
        result = yield from recipes.summed(self._messages, self._floats())
        yield Gate.WRITE
        values = self._outputs()
        recipes.decode(self._messages, result, values, self._factor)
        for gradient, value in zip(self.gradients, values, strict=True):
            if gradient is not None and gradient.dtype is torch.float16:  # whose codes may stand for more than it has
                value.clamp_(-_MOST_FLOAT16, _MOST_FLOAT16)
        self._write(values)

    @torch.no_grad()
    def _write(self, values: list[torch.Tensor]) -> None:
        """Copy means into the gradients to which the kernel has not written directly."""
        for gradient, value in zip(self.gradients, values, strict=True):
            if gradient is not None and gradient is not value:
                gradient.copy_(value.view(gradient.shape))
        self.gradients = []

    def _floats(self) -> list[torch.Tensor]:
        """All values as contiguous float32 tensors: the gradients themselves where possible."""
        values = [
            torch.zeros(slot.numel, dtype=torch.float32, device=self.bucket.device)
            if gradient is None
            else gradient.to(torch.float32).contiguous()  # no copy of a contiguous float32 tensor
            for slot, gradient in zip(self.bucket.slots, self.gradients, strict=True)
        ]
        self._streams.keep(*values)
        return values

    def _outputs(self) -> list[torch.Tensor]:
        """Contiguous float32 tensors for all means: the gradients themselves where possible."""
        outputs = [
            gradient
            # Kernels write float32 to contiguous memory.
            if gradient is not None and gradient.dtype is torch.float32 and gradient.is_contiguous()
            else torch.empty(slot.numel, dtype=torch.float32, device=self.bucket.device)
            for slot, gradient in zip(self.bucket.slots, self.gradients, strict=True)
        ]
        self._streams.keep(*outputs)
        return outputs
