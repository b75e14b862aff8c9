"""What all messages of one bucket in one step have in common: their headers, names and randomness."""

from __future__ import annotations

import torch

from hvd_dyncomp.exchange.buckets import Bucket
from hvd_dyncomp.exchange.codec import HEADER_BYTES, WIRE_VERSION, Header, Phase, header_tensor, noise_for
from hvd_dyncomp.kernels import Noise


class Messages:
    """Makes messages.

    Args:
        bucket: what travels.
        bits: level, below 32.
        step: number of the step, the same on all ranks.
        seed: for stochastic rounding; None rounds to nearest.

    Attributes:
        bucket, bits: see above.
        format: what the kernels have to know.
        where: for error messages.
    """

    def __init__(self, bucket: Bucket, bits: float, step: int, seed: int | None) -> None:
        self.bucket, self.bits, self._step, self._seed = bucket, bits, step, seed
        self.format = {"bits": bits, "block_size": bucket.block_size}
        self.where = f"bucket {bucket.name}"

    def header(self, phase: Phase, blocks: int) -> Header:
        composition = self.bucket.composition
        return Header(WIRE_VERSION, phase, self.bits, 0, composition, self._step & 0xFFFFFFFF, blocks)

    def room(
        self, phase: Phase, counts: list[int], payloads: list[int]
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[int]]:
        """Room for messages of one phase, headers written.

        Args:
            counts: blocks of each.
            payloads: bytes of each, without its header.

        Returns:
            All messages as one uint8 vector, views of their payloads, their lengths.
        """
        lengths = [HEADER_BYTES + payload for payload in payloads]
        buffer = torch.empty(sum(lengths), dtype=torch.uint8, device=self.bucket.device)
        views = []
        for count, message in zip(counts, buffer.split(lengths), strict=True):
            message[:HEADER_BYTES] = header_tensor(self.header(phase, count), self.bucket.device)
            views.append(message[HEADER_BYTES:])
        return buffer, views, lengths

    def codes(self, phase: Phase, counts: list[int]) -> tuple[torch.Tensor, list[torch.Tensor], list[int]]:
        """As `room`, for codes of so many blocks each."""
        return self.room(phase, counts, [count * self.bucket.block_bytes(self.bits) for count in counts])

    def aborts(self, count: int) -> tuple[torch.Tensor, list[int]]:
        """So many messages that say that there will be none: one uint8 vector, and their lengths."""
        header = header_tensor(self.header(Phase.ABORT, 0), self.bucket.device)
        return header.repeat(count), [HEADER_BYTES] * count

    def noise(self, phase: Phase, first: int) -> Noise | None:
        """Randomness for the values from the `first` of the bucket on."""
        if self._seed is None:
            return None
        noise = noise_for(self._seed, self.bucket.rank, self._step, f"{self.bucket.name}/{phase.name}")
        return noise._replace(first=first)

    def name(self, phase: Phase) -> str:
        """What the collective of a phase is called."""
        return f"hvd_dyncomp.{self.bucket.name}.{phase.name.lower()}"
