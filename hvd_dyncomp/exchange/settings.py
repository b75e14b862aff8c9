"""Settings of the exchange that must be the same on all ranks; and what a step is fixed to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from hvd_dyncomp.checks import boolean, integer, shown
from hvd_dyncomp.levels import UNCOMPRESSED

# An exchange divides a bucket among all ranks: with many, messages of a small one are nothing but latency.
_BUCKET_BYTES, _MOST_BUCKET_BYTES, _BYTES_OF_RANK = 8 * 2**20, 128 * 2**20, 2**20

# Of the first step after a rise to 32 bits, which delivers what waits in residuals. It leaves 2^-16 of a block's
# largest value, which is dropped.
DELIVERY_BITS = 16

Skip = Callable[[str, torch.Tensor], bool]  # (name, parameter): whether it travels uncompressed


@dataclass(frozen=True)
class Settings:
    """Settings as plain Python values; `hvd_dyncomp.sessions.options.Options` documents each.

    Raises:
        ValueError: a setting is out of range or of another type; the message names it.
    """

    error_feedback: bool = True
    block_size: int = 512
    min_numel: int = 1024
    bucket_bytes: int | None = None
    hierarchical: Literal[False] | None = None

    def __post_init__(self) -> None:
        boolean("error_feedback", self.error_feedback)
        if self.hierarchical is not None and self.hierarchical is not False:
            raise ValueError(
                f"hierarchical must be None or False, got {shown(self.hierarchical)}: leave it out, and gradients "
                "travel within hosts first wherever all hosts have equally many workers"
            )
        for name, least, most in (("block_size", 64, 65536), ("min_numel", 1, None), ("bucket_bytes", 1, None)):
            value = getattr(self, name)
            if name == "bucket_bytes" and value is None:
                continue
            plain = integer(name, value, least) if most is None else integer(name, value, least, most)
            object.__setattr__(self, name, plain)  # a plain Python value, also for numpy's
        if self.block_size & (self.block_size - 1):
            raise ValueError(f"block_size must be a power of two from 64 to 65536, got {shown(self.block_size)}")

    def bucket_bytes_among(self, world_size: int) -> int:
        """Float32 bytes of a bucket that so many ranks exchange."""
        if self.bucket_bytes is not None:
            return self.bucket_bytes
        return min(max(_BUCKET_BYTES, _BYTES_OF_RANK * world_size), _MOST_BUCKET_BYTES)


class StepConfig(NamedTuple):
    """What is fixed about a step when it begins.

    Attributes:
        number: of the step, the same on all ranks.
        bits: its level.
        epoch: of the step.
        delivers: whether it is the first one after a rise to 32 bits. Its residuals are dropped when it has ended.
    """

    number: int
    bits: float
    epoch: int
    delivers: bool = False

    def with_residuals(self, waiting: bool) -> StepConfig:
        """The same for a step with residuals, if there are any; `waiting` must be the same on all ranks."""
        bits = with_residuals(self.bits, waiting)
        return self._replace(bits=bits, delivers=bits != self.bits)


def with_residuals(bits: float, waiting: bool) -> float:
    """The level of a step that has a level of `bits`, if residuals are waiting or not."""
    return DELIVERY_BITS if waiting and bits == UNCOMPRESSED else bits
