"""The transport: what an exchange needs from whatever sends its bytes.

An exchange knows nothing of Horovod. It gets a `Transport`, one rank's end of a group of ranks, and starts named
collectives on it: `horovod.HorovodTransport` in training, `in_process.World` where N ranks live in one process.

Collectives are matched by name. A name must be the same on all ranks, and must not depend on the order of calls or on
the type of what is sent.
"""

from __future__ import annotations

import json
import logging
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from hvd_dyncomp.errors import LockstepError

logger = logging.getLogger(__name__)

One = TypeVar("One", bound="Transport")

LATE_SECONDS = 10.0  # that a rank waits for others without a word
EVERY_RANK = "every rank must call it: not under 'if {} == 0:'"  # a remedy of `gather_json`
_POLL_SECONDS = 1e-3


class Transport(ABC):
    """One rank's end of a group of ranks. Starting a collective never blocks; `wait` does.

    It belongs to its process: a deep copy of an object that holds one holds the same one.

    Attributes:
        rank_call: how a program asks for its rank, for messages.
        elastic: what keeps quantizers and controllers of elastic training, for messages; "" if nothing does.
        in_order: whether all ranks must start all collectives of tensors on GPUs in one order, whatever their names.
    """

    rank_call = "hvd.rank()"
    elastic = "hvd.elastic.TorchState"
    in_order = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Transport:
        return self

    @property
    @abstractmethod
    def rank(self) -> int:
        """This process's rank in the group; it may change when the group is formed anew."""

    @property
    @abstractmethod
    def size(self) -> int:
        """The number of ranks in the group."""

    @property
    @abstractmethod
    def host(self) -> str:
        """The name of this process's machine. Ranks with the same name share a host."""

    @property
    @abstractmethod
    def local_size(self) -> int:
        """The number of workers on this machine, in this group or not."""

    def obstacle(self, device: torch.device) -> str:
        """Why tensors on a device cannot be sent; "" if they can."""
        return ""

    def within(self, process_set: Any) -> Transport:
        """A transport for the ranks of a process set of Horovod's; None for all."""
        if process_set is not None:
            raise ValueError(f"only Horovod has process sets, got {process_set!r}")
        return self

    @property
    def shared(self) -> Transport:
        """The transport of the same ranks that is not one model's."""
        return self

    def for_exchanges(self: One, phases: Callable[[Sequence[str]], Mapping[str, Sequence[int]]]) -> One:
        """A transport for the exchanges of one model. Where it has to be made, the call is collective.

        Args:
            phases: returns the ranks that take part in each phase of an exchange, by the phase's name and in order,
                from the names of all ranks' hosts.
        """
        return self

    @abstractmethod
    def alltoall(
        self,
        tensor: torch.Tensor,
        ranks: Sequence[int],
        splits: list[int],
        arriving: list[int],
        name: str,
        room: torch.Tensor | None = None,
    ) -> Any:
        """Start sending `splits[i]` bytes of the uint8 vector `tensor` to the i-th rank of some; return a handle.

        All ranks of the transport start it under the same name, each among ranks of its own.

        Args:
            ranks: those that this rank sends to, ascending; the same for all of them.
            arriving: the bytes that come from each: what that rank has in its `splits`.
            room: a uint8 vector for what arrives, of just that length; otherwise the transport makes one.
        """

    @abstractmethod
    def allgather(self, tensor: torch.Tensor, name: str, arriving: list[int] | None = None) -> Any:
        """Start gathering every rank's uint8 vector, in rank order; lengths may differ; return a handle.

        Args:
            arriving: the length of each rank's, if that is known.
        """

    @abstractmethod
    def sum(self, tensor: torch.Tensor, name: str) -> Any:
        """Start adding up every rank's `tensor` (int64 or floating), in its own memory; return a handle."""

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether `sum` takes a floating dtype."""
        return dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)

    def new_label(self, kind: str) -> str:
        """A name for something that works over this transport: the same on ranks that ask in the same order."""
        self._labels = getattr(self, "_labels", 0) + 1
        return f"{kind}{self._labels}"

    @abstractmethod
    def poll(self, handle: Any) -> bool:
        """Whether `wait(handle)` would return at once."""

    @abstractmethod
    def wait(self, handle: Any) -> torch.Tensor:
        """Block until the collective is over; return what was received."""

    def wait_for(self, handle: Any, seconds: float) -> bool:
        """Block until `wait(handle)` would return at once, for about `seconds` at most; return whether it would."""
        until = time.monotonic() + seconds
        while not self.poll(handle):
            if time.monotonic() >= until:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def missing(self, handle: Any) -> list[int]:
        """The ranks that have not started a collective, ascending, as far as the transport can tell."""
        return []

    @abstractmethod
    def in_background(self, work: Callable[[], bool]) -> None:
        """Call `work` now and then until it returns True, whatever the program does or waits for.

        `work` must be quick, never block and never raise.
        """

    def abort(self, reason: str) -> None:  # noqa: B027  # likewise
        """End all collectives of one model (`for_exchanges`): ranks that wait for this one get a LockstepError.

        Where a transport has nothing of its own for a model, they hear of the error when this rank's process ends.

        Args:
            reason: what their error says.
        """

    def check_peers(self) -> None:  # noqa: B027  # likewise
        """Look now and then whether another rank has called `abort`: for waits of a GPU, which would not end then.

        Raises:
            LockstepError: one has.
        """

    def give_way(self) -> None:  # noqa: B027  # most need nothing
        """Give this thread's core to the sender of the bytes for a moment, if started collectives need that."""

    def advise(self, devices: Iterable[torch.device]) -> None:  # noqa: B027  # likewise
        """Log what would make sending faster here, if anything. Once per process.

        Args:
            devices: of the gradients; they are made in the current stream of each.
        """


def in_background(transport: Transport, work: Callable[[], bool]) -> None:
    """`Transport.in_background` for a method: until it returns True or its object has been deleted."""
    this = weakref.WeakMethod(work)

    def alive() -> bool:
        method = this()
        return method is None or method()

    transport.in_background(alive)


def start_gather_json(transport: Transport, value: Any, name: str) -> Any:
    """Start `gather_json`; return a handle. `gathered_json` reads what is received."""
    # json.dumps never emits a newline by itself, so that a newline can end a rank's text.
    text = json.dumps(value).encode() + b"\n"
    return transport.allgather(torch.frombuffer(bytearray(text), dtype=torch.uint8), name)


def gathered_json(received: torch.Tensor) -> list[Any]:
    """Every rank's value, in rank order, of what a wait for `start_gather_json` has returned."""
    return [json.loads(line) for line in received.numpy().tobytes().splitlines()]


def gather_json(transport: Transport, value: Any, name: str, late: tuple[str, str] | None = None) -> list[Any]:
    """Every rank's `value`, in rank order, on every rank. Collective; blocks.

    JSON, because what another worker sends should be data and never code. An allgather of bytes, because it works even
    if the ranks send different shapes: the disagreement can be seen and named, while an allreduce or a broadcast would
    fail or hang.

    Args:
        value: plain data (dicts, lists, numbers with NaN and infinities, strings, None).
        name: of the collective.
        late: for a warning if ranks do not come for 10 s: what they are waited for in, and what to do ("{}" stands for
            how a program asks for its rank). People call such things under `if rank == 0:`.

    Raises:
        LockstepError: another rank gathers something else, where transports match collectives by their order.
    """
    if transport.size == 1:
        return [json.loads(json.dumps(value))]
    handle = start_gather_json(transport, [name, value], name)
    if late is not None and not transport.wait_for(handle, LATE_SECONDS):
        missing = transport.missing(handle)
        ranks, (where, remedy) = f"ranks {missing}" if missing else "other ranks", late
        logger.warning(
            "rank %d has waited %g s in %s for %s: %s",
            transport.rank,
            LATE_SECONDS,
            where,
            ranks,
            remedy.format(transport.rank_call),
        )
    everyone = gathered_json(transport.wait(handle))
    for rank, (theirs, _) in enumerate(everyone):
        if theirs != name:
            raise LockstepError(
                f"rank {transport.rank} has called {name}, and rank {rank} {theirs}: every rank must make the same "
                "calls in the same order"
            )
    return [value for _, value in everyone]


def of_all(size: int, ranks: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """By rank of `size`, the lengths of some of them, and 0 for the others."""
    of = dict(zip(ranks, lengths, strict=True))
    return [of.get(rank, 0) for rank in range(size)]
