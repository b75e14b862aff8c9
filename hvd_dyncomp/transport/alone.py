"""The transport of a process that trains alone: every collective is over when it starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hvd_dyncomp.transport.base import Transport


class Alone(Transport):
    """A group of one rank."""

    rank, size, local_size = 0, 1, 1

    def alltoall(
        self,
        tensor: torch.Tensor,
        ranks: Sequence[int],
        splits: list[int],
        arriving: list[int],
        name: str,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return tensor.clone() if out is None else out.copy_(tensor)

    def allgather(self, tensor: torch.Tensor, name: str, arriving: list[int] | None = None) -> torch.Tensor:
        return tensor

    def sum(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        return tensor

    def poll(self, handle: torch.Tensor) -> bool:
        return True

    def wait(self, handle: torch.Tensor) -> torch.Tensor:
        return handle

    def in_background(self, work: Callable[[], bool]) -> None:
        """There is nothing to wait for: whoever waits for the work does it."""
