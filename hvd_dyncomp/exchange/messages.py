"""What all messages of one bucket in one step share: headers, names and randomness."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence

import torch

from hvd_dyncomp.errors import LockstepError
from hvd_dyncomp.exchange.buckets import Bucket
from hvd_dyncomp.exchange.coding import Span
from hvd_dyncomp.exchange.streams import uploaded
from hvd_dyncomp.exchange.wire import HEADER_BYTES, WIRE_VERSION, Header, Phase
from hvd_dyncomp.kernels import Noise


class Messages:
    """The messages of one bucket in one step.

    Args:
        bucket: what travels.
        bits: level, below 32.
        step: number of the step, the same on all ranks.
        stochastic: round values stochastically instead of to nearest.

    Attributes:
        bucket, bits: see above.
        coding: of the bucket's blocks.
        where: begins error messages.
    """

    def __init__(self, bucket: Bucket, bits: float, step: int, stochastic: bool) -> None:
        self.bucket, self.bits, self._step, self._stochastic = bucket, bits, step, stochastic
        self.coding = bucket.coding(bits)
        self.where = f"bucket {bucket.name}"
        # Headers on their way to the host, what is expected, and the senders.
        self._unread: list[tuple[torch.Tensor, list[Header], Sequence[int]]] = []

    def header(self, phase: Phase, blocks: int) -> Header:
        composition = self.bucket.composition
        return Header(WIRE_VERSION, phase, self.bits, 0, composition, self._step & 0xFFFFFFFF, blocks)

    def room(
        self, phase: Phase, counts: list[int], payloads: list[int]
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[int]]:
        """Memory for the messages of one phase, with their headers written.

        Args:
            phase: of the messages.
            counts: blocks of each message.
            payloads: bytes of each message, without its header.

        Returns:
            All messages as one uint8 vector, views of their payloads, their lengths.
        """
        lengths = [HEADER_BYTES + payload for payload in payloads]
        buffer = torch.empty(sum(lengths), dtype=torch.uint8, device=self.bucket.device)
        views = []
        for header, message in zip(self._headers(phase, counts), buffer.split(lengths), strict=True):
            message[:HEADER_BYTES] = header
            views.append(message[HEADER_BYTES:])
        return buffer, views, lengths

    def _headers(self, phase: Phase, counts: list[int]) -> Sequence[torch.Tensor]:
        headers = [self.header(phase, count) for count in counts]
        return headers_tensor(headers, self.bucket.device).split(HEADER_BYTES)

    def codes(self, phase: Phase, spans: list[Span]) -> tuple[torch.Tensor, list[torch.Tensor], list[int]]:
        """Memory as `room` makes it, for codes: one message per span."""
        return self.room(phase, [span.blocks for span in spans], [self.coding.nbytes(span) for span in spans])

    def around(self, phase: Phase, spans: list[Span], payload: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        """Messages from codes that exist already.

        Args:
            phase: of the messages.
            spans: of each message, consecutive.
            payload: the codes of all spans.

        Returns:
            All messages as one uint8 vector, their lengths.
        """
        payloads = payload.split([self.coding.nbytes(span) for span in spans])
        headers = self._headers(phase, [span.blocks for span in spans])
        messages = torch.cat([part for message in zip(headers, payloads, strict=True) for part in message])
        return messages, [HEADER_BYTES + payload.numel() for payload in payloads]

    def split(
        self, received: torch.Tensor, phase: Phase, spans: list[Span], senders: tuple[int, ...]
    ) -> list[torch.Tensor]:
        """Cut messages of codes apart: per span, its payload as a uint8 view into `received`.

        Args:
            received: (bytes,) uint8, the messages one after the other.
            phase: of the messages.
            spans: of each message.
            senders: the rank that sent each.

        Raises:
            LockstepError: a message is not as expected; the text names the rank and what differs. For messages on a
                GPU, `read` raises it instead, unless a length is wrong.
        """
        headers = [self.header(phase, span.blocks) for span in spans]
        return self.cut(received, headers, [self.coding.nbytes(span) for span in spans], senders)

    def cut(
        self, received: torch.Tensor, headers: list[Header], sizes: list[int], senders: Sequence[int]
    ) -> list[torch.Tensor]:
        """Cut messages apart as `split` does, given their headers and their sizes in bytes without header."""
        beginnings: list[torch.Tensor] = []

        def read_later(message: torch.Tensor, *expected: object) -> None:
            beginnings.append(message[:HEADER_BYTES])

        check = read_later if self.bucket.streams.late else check_header
        bodies = split(received, headers, sizes, self.where, senders, check)
        if beginnings:  # to look at them now, backward would have to wait for the GPU
            self._unread.append((torch.cat(beginnings).to("cpu", non_blocking=True), headers, senders))
        return bodies

    def read(self) -> None:
        """Check the headers that `cut` could not read. Call it when the device has caught up.

        Raises:
            LockstepError: as `split` does.
        """
        for beginnings, headers, senders in self._unread:
            for beginning, header, rank in zip(beginnings.split(HEADER_BYTES), headers, senders, strict=True):
                check_header(beginning, header, rank, self.where)
        self._unread = []

    def aborts(self, count: int) -> tuple[torch.Tensor, list[int]]:
        """`count` abort messages, in place of the real ones: one uint8 vector, and their lengths."""
        header = header_tensor(self.header(Phase.ABORT, 0), self.bucket.device)
        return header.repeat(count), [HEADER_BYTES] * count

    def noise(self, phase: Phase) -> Noise | None:
        """Randomness for the bucket's values, counted from its first; None unless rounding is stochastic."""
        if not self._stochastic:
            return None
        return noise_for(self.bucket.rank, self._step, f"{self.bucket.name}/{phase.name}")

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


def check_header(message: torch.Tensor, expected: Header, rank: int, where: str) -> None:
    """Compare the header at the start of `message` with the one expected of `rank`.

    Raises:
        LockstepError: they differ; the text names `where`, the rank and what differs.
    """
    if message.numel() < HEADER_BYTES:
        raise LockstepError(f"{where}: rank {rank} sent {message.numel()} bytes, which is less than a header")
    theirs = Header.from_bytes(message[:HEADER_BYTES].cpu().numpy().tobytes())
    if theirs.phase == Phase.ABORT:
        raise LockstepError(
            f"{where}: rank {rank} gave up the exchange: its own error says why, or it loaded a state between backward "
            "and step"
        )
    for field, mine, other in zip(Header._fields, expected, theirs, strict=True):
        if mine != other:
            raise LockstepError(f"{where}: rank {rank} has {field} {other}, this rank has {mine}")


def split(
    received: torch.Tensor,
    expected: list[Header],
    sizes: list[int],
    where: str,
    senders: Sequence[int],
    check: Callable[[torch.Tensor, Header, int, str], None] = check_header,
) -> list[torch.Tensor]:
    """Cut what a collective delivered into its messages and check every header.

    Args:
        received: (bytes,) uint8, the messages one after the other.
        expected: their headers.
        sizes: bytes of each, without the header.
        where: begins the error message.
        senders: the rank that sent each.
        check: compares a header of the right length.

    Returns:
        Their payloads, uint8 views into `received`.

    Raises:
        LockstepError: a message is not as expected; the text names the rank and what differs.
    """
    bodies, start = [], 0
    for rank, header, size in zip(senders, expected, sizes, strict=True):
        length = HEADER_BYTES + size
        message = received[start : start + length]
        if message.numel() < length:
            check_header(message, header, rank, where)  # what it says explains the length best
            raise LockstepError(f"{where}: rank {rank} sent {message.numel()} bytes, expected {length}")
        check(message, header, rank, where)
        bodies.append(message[HEADER_BYTES:])
        start += length
    if start != received.numel():
        raise LockstepError(f"{where}: {received.numel()} bytes arrived, expected {start}")
    return bodies


def header_tensor(header: Header, device: torch.device) -> torch.Tensor:
    """A header as (16,) uint8. Does not wait for the device."""
    return headers_tensor([header], device)


def headers_tensor(headers: Sequence[Header], device: torch.device) -> torch.Tensor:
    """Headers one after the other. Does not wait for the device."""
    data = b"".join(header.to_bytes() for header in headers)
    return uploaded(torch.frombuffer(bytearray(data), dtype=torch.uint8), device)


def noise_for(rank: int, step: int, message: str) -> Noise:
    """Randomness of one message. It depends only on the arguments, and leaves every global generator alone."""
    words = random.Random(f"0/{rank}/{step}/{message}")  # strings are hashed with SHA-512: stable everywhere
    return Noise((words.getrandbits(32), words.getrandbits(32)))
