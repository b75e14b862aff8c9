"""The transport: the interface between exchanges and the library that sends their bytes.

Exchanges know nothing of Horovod or torch.distributed. They start named collectives on a `Transport`, which is one
rank's end of a group of ranks: `horovod.HorovodTransport`, `torch_distributed.ProcessGroupTransport`,
`alone.Alone` for one process, or `hvd_dyncomp.simulate.World`, where all ranks live in one process.

Collectives are matched by name. A name must be equal on all ranks, and must not depend on the order of calls or on the
type of the data. Exchanges of a bucket are called `<bucket>.<phase>`, with a phase of `exchange.wire.Phase`, and
sums of gradients `….uncompressed`: a transport that matches by order, as `ProcessGroupTransport` does, keeps an order
for each phase.
"""

from __future__ import annotations

import json
import socket
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

import torch

from hvd_dyncomp.errors import InFlight, LockstepError


class Transport(ABC):
    """One rank's end of a group of ranks. Starting a collective never blocks; `wait` does.

    It belongs to its process: a deep copy of an object that holds one holds the same one.

    Attributes:
        rank_call: how a program asks for its rank, for messages.
        elastic: the object that keeps quantizers and controllers in elastic training, for messages; "" if none does.
        in_order: whether all ranks must start all collectives of tensors on GPUs in one order, whatever their names.
        changes: whether ranks may come and go while this process lives, which then meets others in its steps only.
    """

    rank_call = "hvd.rank()"
    elastic = "hvd.elastic.TorchState"
    in_order = False
    changes = False

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
    def host(self) -> str:
        """The name of this process's machine. Ranks with the same name share a host."""
        return socket.gethostname()

    def hosts(self) -> Sequence[str]:
        """The name of every rank's host, in rank order. Collective, and blocks, unless the transport knows them."""
        return gather_json(self, self.host, "hvd_dyncomp.hosts")

    @property
    @abstractmethod
    def local_size(self) -> int:
        """The number of workers on this machine, in this group or not."""

    def unsupported_reason(self, device: torch.device) -> str:
        """Why tensors on a device cannot be sent; "" if they can."""
        return ""

    def within(self, process_set: Any) -> Transport:
        """A transport for the ranks of a process set of Horovod's; None for all."""
        if process_set is not None:
            raise ValueError(f"only Horovod has process sets, got {process_set!r}")
        return self

    @property
    def shared(self) -> Transport:
        """The transport of the same ranks that all models share."""
        return self

    def for_exchanges(self, phases: Mapping[str, Sequence[int]]) -> Self:
        """A transport for the exchanges of one model. The call is collective if a transport has to be made.

        Args:
            phases: the ranks that take part in each phase of an exchange, by the phase's name and in order.
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
        out: torch.Tensor | None = None,
    ) -> Any:
        """Start sending `splits[i]` bytes of the uint8 vector `tensor` to the i-th rank of some; return a handle.

        All ranks of the transport start it under the same name, each among ranks of its own.

        Args:
            ranks: the ranks that take part with this one, ascending; equal on all of them.
            arriving: the bytes that each of them sends to this rank, as in its `splits`. No transport needs to check
                that: where they might differ, ranks have disagreed in their greetings.
            out: receives the data: a uint8 vector of exactly that length. None: the transport makes one.
        """

    @abstractmethod
    def allgather(self, tensor: torch.Tensor, name: str, arriving: list[int] | None = None) -> Any:
        """Start gathering every rank's uint8 vector, in rank order; lengths may differ; return a handle.

        Args:
            arriving: the length of each rank's vector, if it is known.
        """

    @abstractmethod
    def sum(self, tensor: torch.Tensor, name: str) -> Any:
        """Start summing `tensor` (int64 or floating) over ranks, in place; return a handle."""

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether `sum` takes a floating dtype."""
        return dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)

    def new_label(self, kind: str) -> str:
        """A label for a user of this transport: equal on ranks that ask in the same order."""
        self._labels = getattr(self, "_labels", 0) + 1
        return f"{kind}{self._labels}"

    @abstractmethod
    def poll(self, handle: Any) -> bool:
        """Whether `wait(handle)` would return at once."""

    @abstractmethod
    def wait(self, handle: Any) -> torch.Tensor:
        """Block until the collective is over; return the received tensor.

        Raises:
            Exception: it never will be, because another rank has ended or the transport's time limit is over. Which
                one, and when, is the transport's own: `ConnectionError` and `TimeoutError` where it can tell.
        """

    @abstractmethod
    def in_background(self, work: Callable[[], bool]) -> None:
        """Call `work` repeatedly until it returns True, even while the program is busy or waits.

        `work` must be quick, and must neither block nor raise.
        """

    def abort(self) -> None:  # noqa: B027  # some cannot
        """Exchange nothing more for one model (`for_exchanges`), whatever is in flight: this rank has an error.

        Ranks that wait for this one get an error when its process ends.
        """

    def yield_cpu(self) -> None:  # noqa: B027  # most need nothing
        """Sleep for a moment, if the thread that sends the bytes needs this core."""

    def advise(self, devices: Iterable[torch.device]) -> None:  # noqa: B027  # likewise
        """Log once per process which setting would make sending faster, if any.

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
    """Every rank's value, in rank order, from the tensor that `start_gather_json` has received."""
    return [json.loads(line) for line in received.numpy().tobytes().splitlines()]


def gather_json(transport: Transport, value: Any, name: str) -> list[Any]:
    """Every rank's `value`, in rank order, on every rank. Collective; blocks.

    The values travel as JSON, because a worker should accept data from another one and never code. The collective is an
    allgather of bytes, which works even if the ranks' values have different shapes, so a disagreement can be named. An
    allreduce or a broadcast would fail or hang.

    Args:
        value: plain data (dicts, lists, numbers with NaN and infinities, strings, None).
        name: of the collective.

    Raises:
        LockstepError: another rank gathers something else, where transports match collectives by their order.
    """
    if transport.size == 1:
        return [json.loads(json.dumps(value))]
    handle = start_gather_json(transport, [name, value], name)
    everyone = gathered_json(transport.wait(handle))
    for rank, (theirs, _) in enumerate(everyone):
        if theirs != name:
            raise LockstepError(
                f"rank {transport.rank} has called {name}, and rank {rank} {theirs}: every rank must make the same "
                "calls in the same order"
            )
    return [value for _, value in everyone]


def gather_or_raise(transport: Transport, value: Any, error: Exception | None, name: str, fails: str) -> list[Any]:
    """Every rank's `value`, as `gather_json`; an error on one rank is one on all of them. Collective; blocks.

    Args:
        value: plain data.
        error: why this rank has no value; None if it has one.
        name: of the collective.
        fails: what a rank with an error does not do, in words.

    Raises:
        Exception: this rank's own error, when the others have heard of it.
        LockstepError: another rank has one; InFlight, if it is such a one.
    """
    report: dict[str, Any] = {"value": value}
    if error is not None:
        report = {"error": f"{type(error).__name__}: {error}", "in flight": isinstance(error, InFlight)}
    everyone = gather_json(transport, report, name)
    if error is not None:
        raise error
    for rank, theirs in enumerate(everyone):
        if "error" in theirs:
            kind = InFlight if theirs["in flight"] else LockstepError
            raise kind(f"rank {rank} {fails}: {theirs['error']}")
    return [theirs["value"] for theirs in everyone]


def of_all(size: int, ranks: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """By rank of `size`, the lengths of some of them, and 0 for the others."""
    of = dict(zip(ranks, lengths, strict=True))
    return [of.get(rank, 0) for rank in range(size)]
