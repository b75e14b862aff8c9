"""One sender with error feedback, or without: what it owes, and what of it goes out in a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from screening import codec


class Sender:
    """A worker, or the owner of a sum.

    Args:
        sizes: values of each tensor.
        feedback: what does not arrive is owed; otherwise it is lost.
    """

    def __init__(self, sizes: Sequence[int], feedback: bool = True) -> None:
        self.sizes = list(sizes)
        self.residuals = [torch.zeros(size) for size in sizes] if feedback else []

    def send(self, tensors: Sequence[Tensor], bits: float) -> tuple[list[Tensor], int]:
        """What arrives of one step's tensors, and the bytes it took, messages' headers included.

        Args:
            tensors: float32, one of each size, flat. They are sent as one run of blocks.
            bits: the level.
        """
        gradient = torch.cat(list(tensors))
        if self.residuals:
            got, owed = codec.fed_back(gradient, torch.cat(self.residuals), bits)
            self.residuals = list(owed.split(self.sizes))
        else:
            got = codec.decoded(gradient, bits)
        return list(got.split(self.sizes)), codec.message_bytes(gradient.numel(), bits)
