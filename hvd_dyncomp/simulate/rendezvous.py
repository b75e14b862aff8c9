"""One collective among ranks that live in one process (`in_process`)."""

from __future__ import annotations

import torch


class Mismatch(RuntimeError):
    """Ranks started different collectives under one name, or one rank started a collective twice."""


class Collective:
    """One collective in flight.

    Attributes:
        kind: "alltoall", "allgather" or "sum".
        sent: what each rank has sent: a tensor, by rank how much of it goes there, and how much comes from there (None:
            that is not known).
        received: the result of each rank, when all have sent.
        outs: by rank, where it is to be, if that is anywhere else.
        error: why there is no result.
    """

    def __init__(self, kind: str, name: str, size: int) -> None:
        self.kind, self.name, self.size = kind, name, size
        self.sent: dict[int, tuple[torch.Tensor, list[int], list[int] | None]] = {}
        self.received: list[torch.Tensor] | None = None
        self.outs: dict[int, torch.Tensor] = {}
        self.error: Exception | None = None

    def add(self, rank: int, tensor: torch.Tensor, splits: list[int], arriving: list[int] | None) -> None:
        self.sent[rank] = tensor, splits, arriving
        if len(self.sent) == self.size:
            self._complete()

    def place(self, rank: int) -> None:
        """Put what a rank has received where it is to be, if it is as long."""
        out = self.outs.get(rank)
        if out is not None and self.received is not None and len(out) == len(self.received[rank]):
            self.received[rank] = out.copy_(self.received[rank])

    @property
    def over(self) -> bool:
        return self.received is not None or self.error is not None

    def _complete(self) -> None:
        tensors = [self.sent[rank][0] for rank in range(self.size)]
        if self.kind == "sum":
            if len({(tensor.shape, tensor.dtype) for tensor in tensors}) > 1:
                shapes = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
                self.error = Mismatch(f"{self.name}: ranks sum {shapes}")
                return
            total = tensors[0].clone()
            for tensor in tensors[1:]:
                total += tensor
            for tensor in tensors:
                tensor.copy_(total)
            self.received = tensors
        else:
            parts = [tensor.split(splits) for tensor, splits, _ in (self.sent[rank] for rank in range(self.size))]
            for rank in range(self.size):
                arriving, lengths = self.sent[rank][2], [theirs[rank].numel() for theirs in parts]
                if arriving is not None and arriving != lengths:
                    self.error = Mismatch(f"{self.name}: {lengths} bytes come to rank {rank}, which expects {arriving}")
                    return
            self.received = [torch.cat([theirs[rank] for theirs in parts]) for rank in range(self.size)]
