"""The plan: which gradient travels in which bucket. Each rank makes its own; handshakes compare them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from hvd_dyncomp.errors import LockstepError
from hvd_dyncomp.exchange import residual_state
from hvd_dyncomp.exchange.buckets import Bucket, make_buckets
from hvd_dyncomp.exchange.coding import Span
from hvd_dyncomp.exchange.settings import Settings, Skip
from hvd_dyncomp.exchange.source import Source
from hvd_dyncomp.exchange.streams import Streams
from hvd_dyncomp.exchange.topology import Topology, dtype_within_host
from hvd_dyncomp.exchange.wire import MOMENTUM, WIRE_VERSION, Flag, Greeting, Phase, checksum
from hvd_dyncomp.levels import UNCOMPRESSED
from hvd_dyncomp.step_levels import Turn
from hvd_dyncomp.transport.base import Transport

logger = logging.getLogger(__name__)

# Of all messages that a rank sends in one collective: MPI counts bytes in 32 bits, with a sign.
MOST_BYTES = 2**31 - 1

_MOMENTUM = {True: Flag.LESS_MOMENTUM, False: Flag(0), None: Flag.EITHER}


class Plan:
    """What a step needs to know in advance.

    Args:
        source: of the gradients.
        settings: see `Settings`.
        skip: as in `make_buckets`.
        state: of a quantizer, whose residuals are taken over; None for none.

    Attributes:
        source, settings: see above.
        buckets: the buckets, with their residuals.
        parts: those of each part, by its name (`Source.parts`).
        slots: a compressed parameter's place, by name.
        waiting: parameters whose residuals always hold something at few bits: large ones, with error feedback.
        composition: checksum over all that the ranks must agree on, except level and step.
        topology: which ranks share a host; an assumption before `locate`.
        topology_checksum: its checksum; 0 before `locate`.
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
            if obstacle := source.transport.obstacle(device):
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
            discardable=settings.discardable,
            rank=rank,
            world_size=world_size,
            label=self.source.label,
        )
        self.parts: dict[str, list[Bucket]] = {}
        for bucket in self.buckets if source.parts else ():
            self.parts.setdefault(source.parts[bucket.name], []).append(bucket)  # type: ignore[index]  # there are some
        # Assume the topology of the saved state: then nothing moves if it is still the same.
        hosts = state.get("hosts") if state is not None and state["world_size"] == world_size else None
        host_of = {rank: number for number, host in enumerate(hosts or ()) for rank in host}
        self.topology = Topology.of([host_of[r] for r in range(world_size)]) if hosts else Topology.apart(world_size)
        self._names: list[int] = []
        self._fits: tuple[float, Topology] | None = None  # a level and a topology for which lengths were checked
        self.topology_checksum = 0
        self.arranged: Topology | None = None
        self.arrange({})
        if state is not None:
            residual_state.restore(self.buckets, state, rank, world_size, self.source.factor)
        large = {slot.name for slot in self.slots.values() if not slot.small}
        waiting = [parameter for name, parameter in source.parameters() if name in large and settings.error_feedback]
        self.waiting = frozenset(waiting)
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

    def greeting(self, turn: Turn, agreed: Mapping[str, Any], *, fresh: bool) -> Greeting:
        """This rank's greeting for a step.

        Args:
            turn: the step's number and level.
            agreed: as in `Step`.
            fresh: whether backward has run on this rank since the last exchange.
        """
        others = {name: value for name, value in agreed.items() if name != MOMENTUM}
        flags = (Flag.FRESH if fresh else Flag(0)) | _MOMENTUM[agreed.get(MOMENTUM, False)]
        return Greeting(
            WIRE_VERSION,
            Phase.HANDSHAKE,
            turn.bits,
            turn.proposal,
            checksum(f"{self.composition} {others}") if any(others.values()) else self.composition,
            turn.number & 0xFFFFFFFF,
            flags,
            checksum(self.transport.host),
            self.topology_checksum,
        )

    def settle(self, greetings: Sequence[Greeting], bits: float, origins: Mapping[Streams, Any]) -> None:
        """Get ready for a step on which all ranks agree. The same result on all ranks.

        Args:
            greetings: of all ranks, in order.
            bits: level of the step.
            origins: the stream in which each device's gradients of the step are made.

        Raises:
            LockstepError: a rank has worked with another topology.
            ValueError: a message would be too long.
        """
        self._locate(greetings)
        if bits != UNCOMPRESSED:  # otherwise, residuals are on their way out
            self.arrange(origins)
            self._check_lengths(bits)

    def _locate(self, greetings: Sequence[Greeting]) -> None:
        """Learn from the first handshake which ranks share a host. Later, check that this has not changed.

        Raises:
            LockstepError: a rank has worked with another topology. On all ranks.
        """
        names = [greeting.host for greeting in greetings]
        topology, number = self.topology, self.topology_checksum
        if names != self._names:  # every step comes here, and there may be a thousand ranks
            topology = Topology.of(names)
            number = topology.checksum
        for rank, greeting in enumerate(greetings):
            if greeting.topology not in (0, number):
                raise LockstepError(
                    f"rank {rank} has trained with workers on other hosts than now: the ranks of each host are "
                    f"{list(map(list, topology.hosts))} (elastic training: pass the quantizer to "
                    "hvd.elastic.TorchState)"
                )
        if self.topology_checksum:
            return
        self.topology, self.topology_checksum, self._names = topology, number, names
        if self.source.rank == 0:
            self._say()

    def _check_lengths(self, bits: float) -> None:
        """Check that every bucket can be sent at this level. Needs the topology; same result on all ranks.

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
            origins: as in `settle`; on a CPU it may be empty.
        """
        if self.arranged == self.topology:  # in all steps but one; nothing may wait for the streams then
            return
        self.arranged = self.topology
        with contextlib.ExitStack() as stack:
            for streams, origin in origins.items():  # as the messages that come after it
                stack.enter_context(streams.outgoing([origin]))
            for bucket in self.buckets:
                bucket.arrange(self.topology, by_host=self.hierarchical)

    def _say(self) -> None:
        hosts = self.topology.hosts
        if self.hierarchical:
            logger.info("%d hosts of %d workers: hierarchical exchange", len(hosts), len(hosts[0]))
        elif self.settings.hierarchical is None and self.topology.uneven:
            logger.warning(
                "gradients are exchanged among all workers at once, so more leaves a host than the level says: hosts "
                "have different numbers of workers: %s; give all hosts equally many",
                ", ".join(str(len(host)) for host in hosts),
            )

    def discard(self) -> None:
        """Make all residuals what they were when the latest step began.

        Raises:
            RuntimeError: they were not kept.
        """
        if not self.settings.discardable:
            raise RuntimeError("discard needs a copy of the residuals: make the quantizer with discardable=True")
        for bucket in self.buckets:
            bucket.residuals.put_back()

    def residuals(self) -> dict[str, Any]:
        """Both residuals by parameter name (`residual_state.export`), with rank, world size, factor and hosts."""
        return {
            "rank": self.source.rank,
            "world_size": self.source.world_size,
            "factor": self.source.factor,
            "hosts": list(map(list, self.arranged.hosts)) if self.arranged else None,
            **residual_state.export(self.buckets),
        }

    def about(self, bits: float, step: int, agreed: Mapping[str, Any]) -> dict[str, Any]:
        """What the ranks tell each other when they disagree; see `handshake`.

        Args:
            agreed: as in `Step`.
        """
        about = self._about()
        about["settings"] |= {"bits": bits, "step": step, **agreed}
        return about

    def _about(self) -> dict[str, Any]:
        fixed = {"wire version": WIRE_VERSION, "world size": self.source.world_size}
        fixed |= dataclasses.asdict(self.settings)
        parameters = [[name, list(p.shape), str(p.dtype), name in self.slots] for name, p in self.source.named]
        return {"settings": fixed, "parameters": parameters}
