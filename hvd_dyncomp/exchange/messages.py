"""The messages of one bucket in one step: their headers, names and randomness. A header has the number of the step."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from hvd_dyncomp.errors import LockstepError
from hvd_dyncomp.exchange.buckets import Bucket
from hvd_dyncomp.exchange.streams import uploaded
from hvd_dyncomp.exchange.wire import HEADER, HEADER_BYTES, Phase
from hvd_dyncomp.transport.base import Transport
from hvd_dyncomp.transport.group import Group


class Messages:
    """The messages of one bucket in one step.

    Args:
        bucket: what travels.
        bits: level, below 32.
        step: number of the step, the same on all ranks.
        transport: sends them.

    Attributes:
        bucket, bits: see above.
        coding: of the bucket's blocks.
        where: begins error messages.
        groups: what `among` has returned, with the bytes that this rank has sent in each.
    """

    def __init__(self, bucket: Bucket, bits: float, step: int, transport: Transport) -> None:
        self.bucket, self.bits, self._step, self._transport = bucket, bits, step, transport
        self.groups: list[Group] = []
        self.coding = bucket.coding(bits)
        self.where = f"bucket {bucket.name}"
        self._unread: list[tuple[torch.Tensor, Sequence[int]]] = []  # headers on their way to the host, and the senders

    def among(self, ranks: tuple[int, ...]) -> Group:
        """A new group of some ranks, ascending, of which this is one."""
        self.groups.append(Group(self._transport, ranks))
        return self.groups[-1]

    def lengths(self, sizes: Sequence[int]) -> list[int]:
        """Bytes of messages, from those of their payloads."""
        return [HEADER_BYTES + size for size in sizes]

    def allocate(self, sizes: Sequence[int]) -> tuple[torch.Tensor, list[torch.Tensor], list[int]]:
        """Memory for messages, with their headers written.

        Args:
            sizes: bytes of each message, without its header.

        Returns:
            All messages as one uint8 vector, views of their payloads, their lengths.
        """
        lengths = self.lengths(sizes)
        buffer = torch.empty(sum(lengths), dtype=torch.uint8, device=self.bucket.device)
        header, payloads = self._header(), []
        for message in buffer.split(lengths):
            message[: len(header)] = header
            payloads.append(message[len(header) :])
        return buffer, payloads, lengths

    def wrap(self, codes: torch.Tensor, sizes: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
        """Messages from codes that exist already.

        Args:
            codes: the payloads of all messages, one after the other.
            sizes: as in `allocate`.

        Returns:
            All messages as one uint8 vector, their lengths.
        """
        header = self._header()
        messages = torch.cat([part for payload in codes.split(sizes) for part in (header, payload)])
        return messages, self.lengths(sizes)

    def _header(self) -> torch.Tensor:
        """(HEADER_BYTES,) uint8. Does not wait for the device."""
        return uploaded(torch.frombuffer(bytearray(HEADER.pack(self._step)), dtype=torch.uint8), self.bucket.device)

    def payloads(self, received: torch.Tensor, sizes: Sequence[int], senders: Sequence[int]) -> list[torch.Tensor]:
        """Cut messages apart: the payload of each as a uint8 view into `received`.

        Args:
            received: (bytes,) uint8, the messages one after the other.
            sizes: as in `allocate`.
            senders: the rank that sent each.

        Raises:
            LockstepError: a message is not as expected; the text says what differs, and whose header it is.
                For messages on a GPU, `read` raises it instead.
        """
        lengths = self.lengths(sizes)
        if received.numel() != sum(lengths):
            raise LockstepError(f"{self.where}: {received.numel()} bytes arrived, expected {sum(lengths)}")
        messages = received.split(lengths)
        headers = torch.stack([message[:HEADER_BYTES] for message in messages])
        self._unread.append((headers.to("cpu", non_blocking=True), senders))
        if not self.bucket.streams.late:  # to look at them now, backward would have to wait for the GPU
            self.read()
        return [message[HEADER_BYTES:] for message in messages]

    def read(self) -> None:
        """Check the headers that `payloads` could not read. Call it when the device has caught up.

        Raises:
            LockstepError: as `payloads` does.
        """
        unread, self._unread = self._unread, []
        for headers, senders in unread:
            for header, rank in zip(headers, senders, strict=True):
                self._check(header, rank)

    def _check(self, header: torch.Tensor, rank: int) -> None:
        [step] = HEADER.unpack(header.cpu().numpy().tobytes())
        if step != self._step:
            raise LockstepError(f"{self.where}: rank {rank} has step {step}, this rank has {self._step}")

    def dither(self, phase: Phase) -> int:
        """The word that rounds the residual of this phase, counted from the bucket's first block.

        It depends only on what a saved state has, and on no name: a resumed run rounds as the uninterrupted one would,
        and so does a run with other names (`torch.compile`).
        """
        about = f"{self.bucket.rank}/{self._step}/{self.bucket.slots[0].bucket}/{phase.name}"
        return int.from_bytes(hashlib.blake2b(about.encode(), digest_size=4).digest())  # a microsecond

    def name(self, phase: Phase) -> str:
        """The name of the collective of a phase."""
        return f"{self.bucket.collective}.{phase.name.lower()}"
