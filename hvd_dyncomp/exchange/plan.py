"""The plan: which parameter is in which bucket. Each rank makes its own, and handshakes compare them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hvd_dyncomp.errors import LockstepError
from hvd_dyncomp.exchange import residual_state
from hvd_dyncomp.exchange.buckets import Bucket, make_buckets
from hvd_dyncomp.exchange.coding import Span
from hvd_dyncomp.exchange.settings import Settings, Skip
from hvd_dyncomp.exchange.source import Source
from hvd_dyncomp.exchange.streams import Streams
from hvd_dyncomp.exchange.topology import Topology, dtype_within_host
from hvd_dyncomp.exchange.wire import WIRE_VERSION, Flag, Greeting, Phase, checksum
from hvd_dyncomp.levels import UNCOMPRESSED
from hvd_dyncomp.step_levels import StepConfig
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
        state: of a quantizer, from which the residuals are restored; None for none.

    Attributes:
        source, settings: see above.
        buckets: the buckets, with their residuals.
        parts: the buckets of each part, by its name (`Source.parts`).
        slots: the slots of compressed parameters, by name.
        feedback_parameters: large parameters, whose residuals are nonzero in every step at few bits; empty without
            error feedback.
        composition: checksum of all that the ranks must agree on, except level and step.
        topology: which ranks share a host; an assumption until the first handshake.
        topology_checksum: its checksum; 0 until the first handshake.
        arranged: the topology by which the buckets are divided.

    Raises:
        ValueError: the state belongs to another rank or other parameters.
    """

    def __init__(
        self,
        source: Source,
        settings: Settings,
        skip: Skip | None,
        state: Mapping[str, Any] | None,
    ) -> None:
        self.source = source
        self.settings = settings
        rank, world_size = self.source.rank, self.source.world_size
        for device in {parameter.device for _, parameter in source.named}:
            if obstacle := source.transport.unsupported_reason(device):
                raise ValueError(f"parameters on {device} cannot be sent: {obstacle}")
        self.buckets, self.slots = make_buckets(
            self.source.named,
            min_numel=settings.min_numel,
            bucket_bytes=settings.bucket_bytes_among(world_size),
            skip=skip,
            as_in_memory=source.as_in_memory,
            parts=source.parts,
            block_size=settings.block_size,
            error_feedback=settings.error_feedback,
            rank=rank,
            world_size=world_size,
            label=self.source.label,
        )
        halves = {name for name, parameter in source.named if parameter.dtype is torch.float16} & self.slots.keys()
        self._float16_sums = sorted(halves) if source.factor >= 1 else []
        self.parts: dict[str, list[Bucket]] = {}
        for bucket in self.buckets if source.parts else ():
            self.parts.setdefault(source.parts[bucket.name], []).append(bucket)  # type: ignore[index]  # there are some
        # Assume the topology of the saved state: if it is still the same, residuals stay.
        hosts = state.get("hosts") if state is not None and state["world_size"] == world_size else None
        host_of = {rank: number for number, host in enumerate(hosts or ()) for rank in host}
        self.topology = (
            Topology.of([host_of[r] for r in range(world_size)]) if hosts else Topology.one_rank_per_host(world_size)
        )
        self._names: list[int] = []
        self._fits: tuple[float, Topology] | None = None  # a level and a topology for which lengths were checked
        self.topology_checksum = 0
        self.arranged: Topology | None = None
        self.arrange({})
        if state is not None:
            residual_state.restore(self.buckets, state, rank, world_size, self.hosts)
        large = {slot.name for slot in self.slots.values() if not slot.small}
        waiting = [parameter for name, parameter in source.parameters() if name in large and settings.error_feedback]
        self.feedback_parameters = frozenset(waiting)
        self.composition = checksum(json.dumps(self._about()))
        logger.info(
            "bound to %s: %d of %d parameters compressed, in %d buckets",
            source.kind,
            len(self.slots),
            len(self.source.named),
            len(self.buckets),
        )

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
        by_host = self.arranged is not None and self.arranged.two_level and self.settings.hierarchical is None
        return list(map(list, self.arranged.hosts)) if by_host else None  # type: ignore[union-attr]

    def greeting(self, config: StepConfig, to_agree_on: Mapping[str, Any], *, from_backward: bool) -> Greeting:
        """This rank's greeting for a step.

        Args:
            config: the step's number and level.
            to_agree_on: as in `Step`.
            from_backward: whether backward has run on this rank since the last exchange.
        """
        return Greeting(
            WIRE_VERSION,
            Phase.HANDSHAKE,
            config.bits,
            checksum(f"{self.composition} {to_agree_on}") if any(to_agree_on.values()) else self.composition,
            config.number & 0xFFFFFFFF,
            Flag.FROM_BACKWARD if from_backward else 0,
            checksum(self.transport.host),
            self.topology_checksum,
        )

    def apply_topology(self, greetings: Sequence[Greeting], bits: float, origins: Mapping[Streams, Any]) -> None:
        """Apply the topology, and check message lengths, for a step that all ranks agree on. Same result on all ranks.

        Args:
            greetings: of all ranks, in order.
            bits: level of the step.
            origins: the stream in which each device's gradients of the step are made.

        Raises:
            LockstepError: a rank has used another topology before.
            ValueError: a message would be too long.
        """
        self._locate(greetings)
        if bits != UNCOMPRESSED:  # otherwise nothing is quantized
            self.arrange(origins)
            self._check_lengths(bits)

    def _locate(self, greetings: Sequence[Greeting]) -> None:
        """Read from the first greetings which ranks share a host; later check that this has not changed.

        Raises:
            LockstepError: a rank has used another topology before. On all ranks.
        """
        names = [greeting.host for greeting in greetings]
        topology, number = self.topology, self.topology_checksum
        if names != self._names:  # every step comes here, and there may be a thousand ranks
            topology = Topology.of(names)
            number = topology.checksum
        for rank, greeting in enumerate(greetings):
            if greeting.topology not in (0, number):
                raise LockstepError(
                    f"rank {rank} has trained with a different placement of ranks on hosts; the ranks of each host are "
                    f"now {list(map(list, topology.hosts))} (with elastic training, pass the quantizer to "
                    "hvd.elastic.TorchState)"
                )
        if self.topology_checksum:
            return
        self.topology, self.topology_checksum, self._names = topology, number, names
        if self.source.rank == 0:
            self._say()

    def _check_lengths(self, bits: float) -> None:
        """Check that every bucket's messages fit at this level. Needs the topology; same result on all ranks.

        Raises:
            ValueError: a message would be too long.
        """
        if self._fits == (bits, self.topology):
            return
        for bucket in self.buckets:
            codes = bucket.coding(bits).nbytes(Span(0, bucket.blocks))
            near = dtype_within_host(bits).itemsize * bucket.values if self.hierarchical else 0
            if max(codes, near) > MOST_BYTES:
                raise ValueError(
                    f"bucket {bucket.name} of {bucket.values} values cannot be sent at {bits} bits: its messages would "
                    f"have {max(codes, near)} bytes, and MPI takes {MOST_BYTES} at most; use fewer bits, or `skip` or "
                    "split the parameter"
                )
        self._fits = bits, self.topology

    def arrange(self, origins: Mapping[Streams, Any]) -> None:
        """Divide the buckets by the topology. Call it before a step quantizes or releases anything.

        Args:
            origins: as in `apply_topology`; on a CPU it may be empty.
        """
        if self.arranged == self.topology:  # in all steps but one, which must not wait for the streams
            return
        self.arranged = self.topology
        carried = any(bucket.residuals.carries for bucket in self.buckets)
        with contextlib.ExitStack() as stack:
            for streams, origin in origins.items():  # in the stream of the messages that follow
                stack.enter_context(streams.outgoing([origin]))
            for bucket in self.buckets:
                bucket.arrange(self.topology, by_host=self.hierarchical)
        if carried and not any(bucket.residuals.carries for bucket in self.buckets):
            residual_state.warn_of_loss(self.source.rank)

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
        """Refuse sums over ranks that may be too large for their dtype.

        Raises:
            ValueError: gradients that are not averaged are float16, and would be compressed. On all ranks.
        """
        if self._float16_sums and bits < UNCOMPRESSED:
            raise ValueError(
                f"op must be hvd.Average to compress float16 gradients, got hvd.Sum for {self._float16_sums[0]}: a sum "
                "may be too large for float16 (or use 32 bits, or skip= for such parameters)"
            )

    def residuals(self) -> dict[str, Any]:
        """All residuals by parameter name (`residual_state.export`), with rank, world size and hosts."""
        return {
            "rank": self.source.rank,
            "world_size": self.source.world_size,
            "hosts": self.hosts,
            **residual_state.export(self.buckets),
        }

    def about(self, bits: float, step: int, to_agree_on: Mapping[str, Any]) -> dict[str, Any]:
        """What ranks send each other if they disagree; see `handshake`.

        Args:
            to_agree_on: as in `Step`.
        """
        about = self._about()
        about["settings"] |= {"bits": bits, "step": step, **to_agree_on}
        return about

    def _about(self) -> dict[str, Any]:
        fixed = {"wire version": WIRE_VERSION, "world size": self.source.world_size}
        fixed |= dataclasses.asdict(self.settings)
        parameters = [[name, list(p.shape), str(p.dtype), name in self.slots] for name, p in self.source.named]
        return {"settings": fixed, "parameters": parameters}
