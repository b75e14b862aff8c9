"""The plan: which parameter is in which bucket. Each rank makes its own, and handshakes compare them."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping
from typing import Any

import torch

from hvd_dyncomp.exchange import residual_state
from hvd_dyncomp.exchange.buckets import Bucket, make_buckets
from hvd_dyncomp.exchange.coding import Span
from hvd_dyncomp.exchange.handshake import handshake
from hvd_dyncomp.exchange.settings import Settings, Skip, StepConfig
from hvd_dyncomp.exchange.source import Source
from hvd_dyncomp.exchange.task import Collectives
from hvd_dyncomp.exchange.topology import Topology, dtype_within_host
from hvd_dyncomp.exchange.wire import WIRE_VERSION, Greeting, checksum
from hvd_dyncomp.levels import UNCOMPRESSED
from hvd_dyncomp.transport.base import Transport

logger = logging.getLogger(__name__)

# The limit for all messages that a rank sends in one collective: MPI counts bytes in a signed 32-bit integer.
MOST_BYTES = 2**31 - 1


class Plan:
    """The buckets of a model, with their residuals, and the topology of its ranks.

    Args:
        source: of the gradients.
        settings: see `Settings`.
        skip: as in `make_buckets`.
        topology: which ranks share a host. None: that is not known yet. Such a plan compresses nothing.

    Attributes:
        source, settings: see above.
        topology: see above; every rank on a host of its own while that is not known.
        placed: whether it is known.
        buckets: the buckets, with their residuals.
        parts: the buckets of each part, by its name (`Source.parts`).
        slots: the slots of compressed parameters, by name.
        feedback_parameters: large parameters, whose residuals are nonzero in every step at few bits; empty without
            error feedback.
        composition: checksum of all that the ranks must agree on, except level and step.

    Raises:
        ValueError: the transport cannot send from a parameter's device.
    """

    def __init__(
        self,
        source: Source,
        settings: Settings,
        skip: Skip | None,
        topology: Topology | None,
    ) -> None:
        self.source = source
        self.settings = settings
        self.placed = topology is not None
        self.topology = topology or Topology.one_rank_per_host(source.world_size)
        for device in {parameter.device for _, parameter in source.named}:
            if obstacle := source.transport.unsupported_reason(device):
                raise ValueError(f"parameters on {device} cannot be sent: {obstacle}")
        self.buckets, self.slots = make_buckets(
            self.source.named,
            min_numel=settings.min_numel,
            bucket_bytes=settings.bucket_bytes_among(source.world_size),
            skip=skip,
            as_in_memory=source.as_in_memory,
            parts=source.parts,
            block_size=settings.block_size,
            error_feedback=settings.error_feedback,
            rank=source.rank,
            topology=self.topology,
            by_host=self.hierarchical,
            label=self.source.label,
        )
        halves = {name for name, parameter in source.named if parameter.dtype is torch.float16} & self.slots.keys()
        self._float16_sums = sorted(halves) if source.factor >= 1 else []
        self.parts: dict[str, list[Bucket]] = {}
        for bucket in self.buckets if source.parts else ():
            self.parts.setdefault(source.parts[bucket.name], []).append(bucket)  # type: ignore[index]  # there are some
        self._fits: float = UNCOMPRESSED  # a level that was checked
        large = {slot.name for slot in self.slots.values() if not slot.small}
        waiting = [parameter for name, parameter in source.parameters() if name in large and settings.error_feedback]
        self.feedback_parameters = frozenset(waiting)
        self.composition = checksum(json.dumps(self._about()))
        if self.placed and source.rank == 0:
            self._say()

    @property
    def transport(self) -> Transport:
        """The source's."""
        return self.source.transport

    @property
    def hierarchical(self) -> bool:
        """Whether gradients travel within hosts first, then between hosts."""
        return self.settings.hierarchical is None and self.topology.two_level

    @property
    def hosts(self) -> list[list[int]] | None:
        """The ranks of each host, if buckets are divided by host; None if among all ranks, wherever these are."""
        return list(map(list, self.topology.hosts)) if self.hierarchical else None

    def handshake(
        self, config: StepConfig, to_agree_on: Mapping[str, Any], values: Mapping[str, int] | None
    ) -> Collectives[None]:
        """The handshake of a step: until all ranks agree, no message is sent whose length depends on the agreement.

        Args:
            config: the step's number and level.
            to_agree_on, values: as in `Step`.
        """

        def about() -> dict[str, Any]:
            about = {**self._about(), "values": values}
            about["settings"] |= {"bits": config.bits, "step": config.number, **to_agree_on}
            return about

        varies = any(to_agree_on.values())
        composition = checksum(f"{self.composition} {to_agree_on}") if varies else self.composition
        compared = 0 if values is None else checksum(json.dumps(values)) or 1
        greeting = Greeting(WIRE_VERSION, 0, config.bits, composition, config.number & 0xFFFFFFFF, compared)
        return handshake(self.transport, self.source.label, greeting, about)

    def _check_lengths(self, bits: float) -> None:
        for bucket in self.buckets:
            codes = bucket.coding(bits).nbytes(Span(0, bucket.blocks))
            near = dtype_within_host(bits).itemsize * bucket.values if self.hierarchical else 0
            if max(codes, near) > MOST_BYTES:
                raise ValueError(
                    f"bucket {bucket.name} of {bucket.values} values cannot be sent at {bits} bits: its messages would "
                    f"have {max(codes, near)} bytes, and MPI takes {MOST_BYTES} at most; use fewer bits, or `skip` or "
                    "split the parameter"
                )

    def _say(self) -> None:
        hosts = self.topology.hosts
        if self.hierarchical:
            logger.info("%d hosts of %d workers: hierarchical exchange", len(hosts), len(hosts[0]))
        elif self.settings.hierarchical is None and self.topology.uneven:
            logger.warning(
                "hosts have different numbers of workers (%s), so gradients are exchanged among all workers at once, "
                "and a host sends more bytes to other hosts than the level implies; start equally many on each host",
                ", ".join(str(len(host)) for host in hosts),
            )

    def check_level(self, bits: float) -> None:
        """Refuse a level at which sums may be too large for their dtype, or messages too long for MPI.

        Raises:
            ValueError: gradients that are not averaged are float16, and would be compressed; or a message would be too
                long. On all ranks.
        """
        if bits in (UNCOMPRESSED, self._fits):
            return
        if self._float16_sums:
            raise ValueError(
                f"op must be hvd.Average to compress float16 gradients, got hvd.Sum for {self._float16_sums[0]}: a sum "
                "may be too large for float16 (or use 32 bits, or skip= for such parameters)"
            )
        self._check_lengths(bits)
        self._fits = bits

    def check(self, state: Mapping[str, Any]) -> None:
        """Check that `restore` can use a state.

        Raises:
            ValueError: it belongs to another rank or other parameters.
        """
        residual_state.check(self.buckets, state, self.source.rank, self.source.world_size)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Replace all residuals by those of a state. Raises what `check` does, and nothing has changed then."""
        with torch.inference_mode(False):  # steps will write them
            residual_state.restore(self.buckets, state, self.source.rank, self.source.world_size, self.hosts)

    def residuals(self) -> dict[str, Any]:
        """All residuals by parameter name (`residual_state.export`), with rank, world size and hosts."""
        return {
            "rank": self.source.rank,
            "world_size": self.source.world_size,
            "hosts": self.hosts,
            **residual_state.export(self.buckets),
        }

    def _about(self) -> dict[str, Any]:
        fixed = {"wire version": WIRE_VERSION, "world size": self.source.world_size}
        fixed |= dataclasses.asdict(self.settings)
        parameters = [[name, list(p.shape), str(p.dtype), name in self.slots] for name, p in self.source.named]
        return {"settings": fixed, "parameters": parameters}
