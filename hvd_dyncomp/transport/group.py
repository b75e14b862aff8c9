"""Some ranks of a transport, which talk among themselves."""

from __future__ import annotations

from typing import Any

import torch

from hvd_dyncomp.transport.base import Transport


class Group:
    """Ranks of a transport, as a small transport of bytes. No process set is needed: the others are sent 0 bytes.

    All ranks of the transport must start the same collective under the same name, each in a group of its own.

    Args:
        transport: whose ranks they are.
        ranks: which, ascending.
        near: the ranks on this rank's host.

    Attributes:
        ranks: see above.
        sent_bytes: what this rank has handed over for others.
        leaving_bytes: so much of it as was for other hosts.
        under_way: handles of what has been started; to be taken out by who waits for it.
    """

    def __init__(self, transport: Transport, ranks: tuple[int, ...], near: tuple[int, ...]) -> None:
        self._transport, self.ranks, self._near = transport, ranks, near
        self.sent_bytes = self.leaving_bytes = 0
        self.under_way: set[Any] = set()

    def alltoall(self, messages: torch.Tensor, lengths: list[int], name: str) -> Any:
        """Starts sending `lengths[i]` bytes of a uint8 vector to the i-th rank; received are theirs, in their order."""
        self._count(lengths)
        splits = lengths
        if len(self.ranks) < self._transport.size:
            splits = [0] * self._transport.size
            for rank, length in zip(self.ranks, lengths, strict=True):
                splits[rank] = length
        return self._started(self._transport.alltoall(messages, splits, name))

    def allgather(self, message: torch.Tensor, name: str) -> Any:
        """Starts gathering every rank's uint8 vector, in their order; lengths may differ."""
        lengths = [message.numel()] * len(self.ranks)
        if len(self.ranks) < self._transport.size:
            return self.alltoall(message.repeat(len(self.ranks)), lengths, name)
        self._count(lengths)
        return self._started(self._transport.allgather(message, name))

    def _started(self, handle: Any) -> Any:
        self.under_way.add(handle)
        return handle

    def _count(self, lengths: list[int]) -> None:
        for rank, length in zip(self.ranks, lengths, strict=True):
            if rank != self._transport.rank:
                self.sent_bytes += length
                self.leaving_bytes += 0 if rank in self._near else length
