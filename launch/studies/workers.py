"""Simulated workers: the library's own exchange, with all ranks in this process."""

from __future__ import annotations

import torch

from hvd_dyncomp.exchange import residuals
from hvd_dyncomp.exchange.buckets import Bucket, make_buckets
from hvd_dyncomp.exchange.pair import PairExchange
from hvd_dyncomp.exchange.sharded import ShardedExchange
from hvd_dyncomp.transport.in_process import World

BLOCK_SIZE = 512


class Workers:
    """Workers that average one flat gradient each.

    Args:
        size: their number.
        values: in a gradient.
        bits: the level.

    Attributes:
        size: see above.
    """

    def __init__(self, size: int, values: int, bits: int) -> None:
        self.size, self._values, self._bits, self._step = size, values, bits, 0
        self._world = World(size)
        self._buckets = [self._bucket(rank) for rank in range(size)]

    def _bucket(self, rank: int) -> Bucket:
        [bucket], _ = make_buckets(
            [("gradient", torch.empty(self._values))],
            min_numel=1,
            bucket_bytes=1,
            block_size=BLOCK_SIZE,
            error_feedback=True,
            rank=rank,
            world_size=self.size,
        )
        return bucket

    def mean(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """Mean of (values,) float32 gradients, one a worker, as every worker gets it; a single one sends nothing."""
        if self.size == 1:
            [bucket] = self._buckets
            return bucket.with_residual(bucket.slots[0], gradients[0])
        reduced = [gradient.clone() for gradient in gradients]
        exchanges = []
        for bucket, gradient, transport in zip(self._buckets, reduced, self._world.transports, strict=True):
            way = ShardedExchange if bucket.sharded else PairExchange
            exchanges.append(
                way(bucket, bits=self._bits, step=self._step, factor=1 / self.size, seed=None, transport=transport)
            )
            exchanges[-1].add(bucket.slots[0], gradient, at_once=True)
        # All ranks do the first thing before any does the second, and so nobody ever waits.
        for exchange in exchanges:
            exchange.start()
        for exchange in exchanges:
            exchange.forward()
        for exchange in exchanges:
            exchange.deliver()
        self._step += 1
        return reduced[0]

    def debts(self, rank: int) -> dict:
        """What a worker owes, as `resized` takes it."""
        return {
            "rank": None,
            "world_size": self.size,
            "factor": 1 / self.size,
            **residuals.export([self._buckets[rank]]),
        }

    def resized(self, size: int, debts: list[dict]) -> Workers:
        """So many workers; the first of them owe what is in `debts`, the others nothing."""
        after = Workers(size, self._values, self._bits)
        for rank, owed in enumerate(debts[:size]):
            residuals.restore([after._buckets[rank]], owed, rank, size, 1 / size)
        return after
