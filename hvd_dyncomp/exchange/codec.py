"""The wire format: what a message is made of, and how a bucket is cut into shards. docs/wire_format.md mirrors this.

A message is a header of 16 bytes and a number of blocks (`kernels.reference` has their layout). In the scatter phase
rank s sends to every rank r one message with its version of shard r; in the gather phase rank r sends to everyone one
message with the reduced shard r. Two workers need one phase only, in which each sends all blocks to the other. On hosts
of several workers these phases are between hosts, and there is one within hosts before and after. Before any of them,
all ranks send greetings.
"""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Callable, Sequence
from enum import IntEnum, IntFlag
from typing import NamedTuple

import torch

from hvd_dyncomp.errors import LockstepError
from hvd_dyncomp.kernels import Noise
from hvd_dyncomp.levels import level_code, level_of

WIRE_VERSION = 6

# version, phase, level, 0, composition, step, blocks; little-endian; levels as `level_code` has them
_HEADER = struct.Struct("<BBbBIII")
HEADER_BYTES = _HEADER.size
# version, phase, level, proposal, composition, step, flags, host, topology; little-endian
_GREETING = struct.Struct("<BBbbIIIII")
GREETING_BYTES = _GREETING.size


class Phase(IntEnum):
    """What a message is for.

    SCATTER and GATHER are the halves of an exchange; PAIR is both in one, between two workers. A LOCAL_SCATTER has
    values for a neighbour on the same host; LOCAL_GATHER hands on, among neighbours, messages as they came. A HANDSHAKE
    begins a step; an ABORT stands in for what a rank cannot send, and has no blocks.
    """

    SCATTER = 0
    GATHER = 1
    HANDSHAKE = 2
    ABORT = 3
    PAIR = 4
    LOCAL_SCATTER = 5
    LOCAL_GATHER = 6  # the name of a collective only


class Header(NamedTuple):
    """What sender and receiver of a message must agree about.

    Attributes:
        version: of the wire format.
        phase: see `Phase`.
        bits: level of the step.
        reserved: always 0.
        composition: checksum of the bucket's parameters (names, shapes), block size, world size, and who reduces which
            blocks.
        step: the exchange's number, modulo 2^32.
        blocks: blocks that follow.
    """

    version: int
    phase: int
    bits: float
    reserved: int
    composition: int
    step: int
    blocks: int

    def to_bytes(self) -> bytes:
        return _HEADER.pack(*self._replace(bits=level_code(self.bits)))

    @classmethod
    def from_bytes(cls, data: bytes) -> Header:
        header = cls(*_HEADER.unpack(data))
        return header._replace(bits=level_of(int(header.bits)))


class Greeting(NamedTuple):
    """What a rank tells all others when a step begins.

    Attributes:
        version: of the wire format.
        phase: HANDSHAKE.
        bits: level of the step; 32 means uncompressed.
        proposal: on rank 0, the level that it wants from the next step on (`auto_level`); otherwise 0.
        composition: checksum of all parameters, settings and world size.
        step: its number, modulo 2^32.
        flags: see `Flag`.
        host: checksum of the name of its host.
        topology: checksum of the `Topology` that it has worked with before; 0 if it has not.
    """

    version: int
    phase: int
    bits: float
    proposal: float
    composition: int
    step: int
    flags: int
    host: int
    topology: int

    def to_bytes(self) -> bytes:
        return _GREETING.pack(*self._replace(bits=level_code(self.bits), proposal=level_code(self.proposal)))

    @classmethod
    def from_bytes(cls, data: bytes) -> Greeting:
        greeting = cls(*_GREETING.unpack(data))
        return greeting._replace(bits=level_of(int(greeting.bits)), proposal=level_of(int(greeting.proposal)))


class Span(NamedTuple):
    """Consecutive blocks of a bucket: `blocks` of them from the `first` on."""

    first: int
    blocks: int


class Flag(IntFlag):
    """In a greeting.

    FRESH: backward has run on this rank since the last exchange. FAILED: this rank has no use for its quantizer, and
    will say why. CONTROLLER: this rank is in `Controller.step`.
    """

    FRESH = 1
    FAILED = 2
    CONTROLLER = 4


def uploaded(here: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of main memory on a device, for which nothing waits."""
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here.to(device)


def header_tensor(header: Header, device: torch.device) -> torch.Tensor:
    """(16,) uint8. Does not wait for the device."""
    return headers_tensor([header], device)


def headers_tensor(headers: Sequence[Header], device: torch.device) -> torch.Tensor:
    """Headers one after the other. Does not wait for the device."""
    data = b"".join(header.to_bytes() for header in headers)
    return uploaded(torch.frombuffer(bytearray(data), dtype=torch.uint8), device)


def check_header(message: torch.Tensor, expected: Header, rank: int, where: str) -> None:
    """Compares the header that begins `message` with the one expected of `rank`.

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
    """Cuts what a collective delivered into its messages and checks every header.

    Args:
        received: (bytes,) uint8, the messages one after the other.
        expected: their headers.
        sizes: bytes in each, without the header.
        where: for the error message, and
        senders: the rank that each came from.
        check: compares headers that are as long as they should be.

    Returns:
        Their payloads, uint8 views into `received`.

    Raises:
        LockstepError: a message is not what this rank expects; the text names the rank and what differs.
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


def count_nonfinite(upper_halves: list[torch.Tensor]) -> torch.Tensor:
    """Blocks that are not finite in at least one of some versions of the same blocks: an int64 where the versions are.

    Args:
        upper_halves: of the scales in each version, (2 * blocks,) uint8: a bfloat16 each, whatever the level.
    """
    # The scale of a block is NaN if a value is NaN or infinite.
    return torch.stack([half.view(torch.bfloat16) for half in upper_halves]).isnan().any(dim=0).sum()


def shard_bounds(blocks: int, world_size: int) -> list[int]:
    """First block of every rank's shard, and the end: `world_size + 1` numbers; shards differ by at most one block."""
    return [blocks * rank // world_size for rank in range(world_size + 1)]


def checksum(text: str) -> int:
    """32 bits that tell two texts apart (CRC-32)."""
    return zlib.crc32(text.encode())


def noise_for(seed: int, rank: int, step: int, message: str) -> Noise:
    """Randomness of one message: depends on the arguments alone and touches no global generator."""
    words = random.Random(f"{seed}/{rank}/{step}/{message}")  # strings are hashed with SHA-512: stable everywhere
    return Noise((words.getrandbits(32), words.getrandbits(32)))
