"""Named collectives, made of messages between two ranks each. Knows nothing of networks or of who waits.

Every rank sends every other rank one message for each collective: its key, which is a digest of kind and name, and a
body, which may be empty. What arrives is held until the collective is started here as well. Between two ranks messages
arrive in the order of sending; nothing else is asked for. So ranks may start collectives in different orders, and the
length of a message is its sender's own affair. Under one name the k-th of each rank meet.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from collections import defaultdict, deque
from collections.abc import Callable

import torch

from hvd_dyncomp.transport.staging import Post, joined

KEY_BYTES = 16

Finish = Callable[[list[torch.Tensor]], torch.Tensor]


class Collective:
    """One collective under way, as one rank sees it.

    Attributes:
        name: see the module.
        missing: the ranks whose message has not arrived.
        error: why it cannot complete.
        waited: since when somebody has waited for it, by the monotonic clock; None if nobody has.
    """

    def __init__(self, name: str, rank: int, parts: list[torch.Tensor], finish: Finish) -> None:
        self.name, self._parts, self._finish = name, parts, finish
        self.missing = set(range(len(parts))) - {rank}
        self._unsent = len(self.missing)
        self.error: Exception | None = None
        self.waited: float | None = None

    @property
    def over(self) -> bool:
        """Whether all messages have arrived and all of this rank's are sent; or there is an error."""
        return self.error is not None or not (self.missing or self._unsent)

    def result(self) -> torch.Tensor:
        """The result, when it is over. Call it once.

        Raises:
            Exception: `error`.
        """
        if self.error is not None:
            raise self.error
        return self._finish(self._parts)

    def received(self, rank: int, body: torch.Tensor) -> None:
        self._parts[rank] = body
        self.missing.discard(rank)

    def sent(self) -> None:
        self._unsent -= 1


class Collectives:
    """One rank's end of all collectives of a group. Several threads may use it.

    Args:
        rank, size: of the group.
        post: sends a message.

    Attributes:
        changed: a condition, notified when a collective is over; its lock guards everything else.
    """

    def __init__(self, rank: int, size: int, post: Post) -> None:
        self._rank, self._size, self._post = rank, size, post
        self.changed = threading.Condition(threading.RLock())  # a message may be sent before `post` returns
        self._expected: defaultdict[tuple[int, bytes], deque[Collective]] = defaultdict(deque)
        self._early: defaultdict[tuple[int, bytes], deque[torch.Tensor]] = defaultdict(deque)
        self._lost: dict[int, Exception] = {}

    def alltoall(self, tensor: torch.Tensor, splits: list[int], name: str) -> Collective:
        """As `base.Transport` has it."""
        return self._start(
            "alltoall", name, list(tensor.detach().split(splits)), functools.partial(joined, like=tensor)
        )

    def allgather(self, tensor: torch.Tensor, name: str) -> Collective:
        """As `base.Transport` has it."""
        return self._start("allgather", name, [tensor.detach()] * self._size, functools.partial(joined, like=tensor))

    def sum(self, tensor: torch.Tensor, name: str) -> Collective:
        """As `base.Transport.sum`. Every rank sends the whole tensor to every other rank, so use it for small ones."""
        mine = tensor.detach().contiguous()

        def add(parts: list[torch.Tensor]) -> torch.Tensor:
            values = [part.view(mine.dtype).to(mine.device) for part in parts]
            if len({value.numel() for value in values}) > 1:
                raise ValueError(f"{name}: ranks sum {[value.numel() for value in values]} values")
            total = values[0].clone()
            for value in values[1:]:  # in rank order: every rank has the same bits
                total += value
            return tensor.detach().copy_(total.view(tensor.shape))

        return self._start("sum", name, [mine.view(-1).view(torch.uint8)] * self._size, add)

    def _start(self, kind: str, name: str, bodies: list[torch.Tensor], finish: Finish) -> Collective:
        key = _key(kind, name)
        collective = Collective(name, self._rank, list(bodies), finish)
        with self.changed:
            for rank in sorted(collective.missing):
                early = self._taken(self._early, (rank, key))
                if early is not None:
                    collective.received(rank, early)
                elif rank in self._lost:
                    collective.error = self._lost[rank]
                else:
                    self._expected[rank, key].append(collective)
        for rank in range(self._size):
            if rank != self._rank:
                self._post(rank, key, bodies[rank], functools.partial(self._sent, collective))
        return collective

    def arrived(self, rank: int, key: bytes, body: torch.Tensor) -> None:
        """Take a message that has arrived: (n,) uint8, which this object keeps."""
        with self.changed:
            collective = self._taken(self._expected, (rank, key))
            if collective is None:
                self._early[rank, key].append(body)
            else:
                collective.received(rank, body)
                self._notify(collective)

    def lost(self, rank: int, error: Exception) -> None:
        """Nothing more will arrive from a rank: all that waits for it, now or later, gets the error."""
        with self.changed:
            self._lost[rank] = error
            for sender, key in list(self._expected):
                if sender == rank:
                    for collective in self._expected.pop((sender, key)):
                        collective.error = error
            self.changed.notify_all()

    def _sent(self, collective: Collective) -> None:
        with self.changed:
            collective.sent()
            self._notify(collective)

    def _notify(self, collective: Collective) -> None:
        if collective.over:
            self.changed.notify_all()

    @staticmethod
    def _taken(queues: defaultdict[tuple[int, bytes], deque], which: tuple[int, bytes]):
        """Take the first of a queue; delete the queue if it is then empty."""
        queue = queues.get(which)
        if queue is None:
            return None
        first = queue.popleft()
        if not queue:
            del queues[which]
        return first


@functools.lru_cache(maxsize=4096)
def _key(kind: str, name: str) -> bytes:
    return hashlib.blake2b(f"{kind} {name}".encode(), digest_size=KEY_BYTES).digest()
