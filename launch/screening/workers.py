"""Simulated workers: the library's own exchange, with all ranks in this process."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvd_dyncomp.exchange import residual_state
from hvd_dyncomp.exchange.buckets import Bucket, make_buckets
from hvd_dyncomp.exchange.one_bucket import Exchange
from hvd_dyncomp.exchange.topology import Topology
from hvd_dyncomp.transport.in_process import World
from screening.codec import BLOCK_SIZE


class Workers:
    """Workers that average one flat gradient each.

    Args:
        hosts: the number of workers on each host.
        values: in a gradient.
        feedback: whose quantization carries on what it loses: "both", that of the "workers" and not that of the sum
            (there is one from three workers on), or "none".

    Attributes:
        size: the number of all workers.
    """

    def __init__(self, hosts: Sequence[int], values: int, *, feedback: str = "both") -> None:
        self.size, self._values, self._feedback, self._step = sum(hosts), values, feedback, 0
        names = [host for host, workers in enumerate(hosts) for _ in range(workers)]
        self._world = World(self.size, hosts=names)
        self._topology = Topology.of(names)
        self._buckets = [self._bucket(rank) for rank in range(self.size)]

    def _bucket(self, rank: int) -> Bucket:
        [bucket], _ = make_buckets(
            [("gradient", torch.empty(self._values))],
            min_numel=1,
            bucket_bytes=1,
            block_size=BLOCK_SIZE,
            error_feedback=self._feedback != "none",
            rank=rank,
            world_size=self.size,
        )
        bucket.arrange(self._topology, by_host=self._topology.two_level)
        return bucket

    def mean(self, gradients: Sequence[torch.Tensor], bits: float) -> torch.Tensor:
        """Mean of (values,) float32 gradients, one a worker, as every worker gets it; a single one sends nothing.

        Args:
            bits: the level, less than 32.
        """
        if self.size == 1:
            [bucket] = self._buckets
            bucket.residuals.release()
            return bucket.residuals.join(bucket.slots[0], gradients[0])
        reduced = [gradient.clone() for gradient in gradients]
        exchanges = []
        for bucket, gradient, transport in zip(self._buckets, reduced, self._world.transports, strict=True):
            exchange = Exchange(
                bucket,
                bits=bits,
                step=self._step,
                factor=1 / self.size,
                stochastic=False,
                transport=transport,
                own_memory=True,
            )
            exchange.add(bucket.slots[0], gradient)
            exchanges.append(exchange)
        while exchanges:  # nobody waits: what is not over goes on in the next round
            exchanges = [exchange for exchange in exchanges if not exchange.advance()]
        self._step += 1
        if self._feedback == "workers":
            for bucket in self._buckets:
                bucket.residuals.shard.zero_()
        return reduced[0]

    def residuals(self, rank: int) -> dict:
        """A worker's residuals, as `resized` takes them."""
        return {
            "rank": None,
            "world_size": self.size,
            "factor": 1 / self.size,
            **residual_state.export([self._buckets[rank]]),
        }

    def resized(self, hosts: Sequence[int], residuals: list[dict]) -> Workers:
        """Workers on so many hosts; the first of them have these residuals, the others none."""
        after = Workers(hosts, self._values, feedback=self._feedback)
        for rank, own in enumerate(residuals[: after.size]):
            residual_state.restore([after._buckets[rank]], own, rank, after.size, 1 / after.size)
        return after

    def forget_what_is_far(self) -> None:
        """Keeps residuals only in each worker's own section of the gradient."""
        for bucket in self._buckets:
            residuals, kept = bucket.residuals, torch.zeros(bucket.blocks * bucket.block_size)
            kept[residuals.own_range] = residuals.undelivered()[residuals.own_range]
            residuals.put(kept)
