"""One sender with error feedback, or without: what it owes, and what of it goes out in a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from screening import codec

Groups = dict[float, list[int]]  # by bits a value: which tensors travel at this level


class Sender:
    """A worker, or the owner of a sum.

    Args:
        sizes: values of each tensor.
        feedback: what does not arrive is owed; otherwise it is lost.
    """

    def __init__(self, sizes: Sequence[int], feedback: bool = True) -> None:
        self.sizes = list(sizes)
        self.residuals = [torch.zeros(size) for size in sizes] if feedback else []

    def send(self, tensors: Sequence[Tensor], groups: Groups) -> tuple[list[Tensor], int]:
        """What arrives of one step's tensors, and the bytes it took, messages' headers included.

        Args:
            tensors: float32, one of each size, flat.
            groups: those of one level are sent as one run of blocks.
        """
        arrived: list[Tensor] = [torch.empty(0)] * len(tensors)
        total = 0
        for bits, members in groups.items():
            sizes = [self.sizes[i] for i in members]
            gradient = torch.cat([tensors[i] for i in members])
            if self.residuals:
                got, owed = codec.fed_back(gradient, torch.cat([self.residuals[i] for i in members]), bits)
                for i, left in zip(members, owed.split(sizes), strict=True):
                    self.residuals[i] = left
            else:
                got = codec.decoded(gradient, bits)
            for i, part in zip(members, got.split(sizes), strict=True):
                arrived[i] = part
            total += codec.message_bytes(gradient.numel(), bits)
        return arrived, total
