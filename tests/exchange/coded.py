"""Messages of codes that are all at one level, as tests write and read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from hvd_dyncomp.exchange.buckets import make_buckets
from hvd_dyncomp.exchange.messages import Messages
from hvd_dyncomp.exchange.topology import Topology
from hvd_dyncomp.exchange.wire import HEADER as HEADER_FORMAT
from hvd_dyncomp.kernels import block_bytes
from hvd_dyncomp.transport.alone import Alone

STEP = 0xBADCAB1E


def header(step: int = STEP) -> bytes:
    """Of a message."""
    return HEADER_FORMAT.pack(step)


HEADER_BYTES = len(header())


def message_bytes(blocks: int, bits: float, block_size: int) -> int:
    """Length of a message of `blocks` blocks."""
    return HEADER_BYTES + blocks * block_bytes(bits, block_size)


def message(payload: torch.Tensor, step: int = STEP) -> torch.Tensor:
    """What a rank sends."""
    return torch.cat([torch.tensor(list(header(step)), dtype=torch.uint8), payload])


def payloads(received: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """What `Messages.payloads` returns in step `STEP`: of messages from all ranks in order, with so many bytes."""
    [[bucket], _] = make_buckets(
        [("here", torch.zeros(1))],
        **{"min_numel": 1, "bucket_bytes": 4, "block_size": 64, "rank": 0, "topology": Topology.one_rank_per_host(2)},
        error_feedback=False,
    )
    return Messages(bucket, 4, STEP, Alone()).payloads(received, sizes, range(len(sizes)))


def random_payloads(sizes: Iterable[int], seed: int) -> list[torch.Tensor]:
    """Any bytes."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(256, (size,), generator=generator, dtype=torch.uint8) for size in sizes]
