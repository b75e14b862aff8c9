"""Messages of codes that are all at one level, as tests write and read them."""

from __future__ import annotations

import torch

from hvd_dyncomp.exchange.messages import split
from hvd_dyncomp.exchange.wire import HEADER_BYTES, Header
from hvd_dyncomp.kernels import block_bytes


def message_bytes(blocks: int, bits: float, block_size: int) -> int:
    """Length of a message of `blocks` blocks."""
    return HEADER_BYTES + blocks * block_bytes(bits, block_size)


def split_messages(received: torch.Tensor, expected: list[Header], block_size: int, where: str) -> list[torch.Tensor]:
    """As `split`, of messages from all ranks in order."""
    sizes = [header.blocks * block_bytes(header.bits, block_size) for header in expected]
    return split(received, expected, sizes, where, range(len(expected)))
