"""A group: some ranks of a transport that exchange messages among themselves."""

from __future__ import annotations

from typing import Any

import torch

from hvd_dyncomp.transport.base import Transport


class Group:
    """A transport of bytes among some ranks of another.

    All ranks of the transport must start the same collective under the same name, each in a group of its own.

    Args:
        transport: the transport of all ranks.
        ranks: the ranks of the group, ascending.

    Attributes:
        ranks: see above.
        sent_bytes: bytes that this rank has sent to other ranks.
    """

    def __init__(self, transport: Transport, ranks: tuple[int, ...]) -> None:
        self._transport, self.ranks = transport, ranks
        self.sent_bytes = 0

    def alltoall(
        self,
        messages: torch.Tensor,
        lengths: list[int],
        arriving: list[int],
        name: str,
        out: torch.Tensor | None = None,
    ) -> Any:
        """Start sending `lengths[i]` bytes of a uint8 vector to the i-th rank, of which `arriving[i]` bytes come.

        The result is in the order of the ranks, and in `out` if there is any.
        """
        self._count(lengths)
        return self._transport.alltoall(messages, self.ranks, lengths, arriving, name, out)

    def allgather(self, message: torch.Tensor, arriving: list[int], name: str) -> Any:
        """Start gathering the ranks' uint8 vectors, of `arriving[i]` bytes each, in the order of the ranks."""
        lengths = [message.numel()] * len(self.ranks)
        if len(self.ranks) < self._transport.size:
            return self.alltoall(message.repeat(len(self.ranks)), lengths, arriving, name)
        self._count(lengths)
        return self._transport.allgather(message, name, arriving)

    def _count(self, lengths: list[int]) -> None:
        own = self._transport.rank
        self.sent_bytes += sum(length for rank, length in zip(self.ranks, lengths, strict=True) if rank != own)
