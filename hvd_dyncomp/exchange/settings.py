"""How gradients travel: what must be the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from hvd_dyncomp.checks import boolean, integer, shown

Skip = Callable[[str, torch.Tensor], bool]  # of a name and a parameter: is it to travel uncompressed?


class Settings(NamedTuple):
    """`DynamicQuantizer` has the meaning of each."""

    error_feedback: bool
    block_size: int
    min_numel: int
    bucket_bytes: int
    fp16_uncompressed: bool
    auto_level: bool
    hierarchical: bool | None

    def checked(self) -> Settings:
        """The same, as plain Python values.

        Raises:
            ValueError: one of them is out of range, or of another type; the text names it.
        """
        plain = Settings(
            error_feedback=boolean("error_feedback", self.error_feedback),
            block_size=integer("block_size", self.block_size, 64, 65536),
            min_numel=integer("min_numel", self.min_numel, 1),
            bucket_bytes=integer("bucket_bytes", self.bucket_bytes, 1),
            fp16_uncompressed=boolean("fp16_uncompressed", self.fp16_uncompressed),
            auto_level=boolean("auto_level", self.auto_level),
            hierarchical=None if self.hierarchical is None else boolean("hierarchical", self.hierarchical),
        )
        if plain.block_size & (plain.block_size - 1):
            raise ValueError(f"block_size must be a power of two from 64 to 65536, got {shown(plain.block_size)}")
        return plain
