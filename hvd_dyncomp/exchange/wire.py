"""The wire format: the content of a message. docs/wire_format.md mirrors this.

A message is a header and a number of blocks (`kernels.reference` has their layout). In the scatter phase
rank s sends every rank r one message with its version of shard r. In the gather phase rank r sends everyone one message
with the reduced shard r. Two workers need only one phase, in which each sends all blocks to the other. On hosts of
several workers these phases run between hosts, with a phase within hosts before and after. Before any of them, all
ranks send greetings.
"""

from __future__ import annotations

import struct
import zlib
from enum import Enum
from typing import NamedTuple

from hvd_dyncomp.levels import level_code, level_of

WIRE_VERSION = 13

# A message begins with the number of its step, little-endian.
HEADER = struct.Struct("<Q")
HEADER_BYTES = HEADER.size
# version, failed, level as `level_code` has it, composition, step, values; little-endian
_GREETING = struct.Struct("<BBhIII")
GREETING_BYTES = _GREETING.size


class Phase(Enum):
    """The purpose of a collective, and a part of its name.

    SCATTER and GATHER are the halves of an exchange; PAIR is both in one, between two workers. A LOCAL_SCATTER has
    values for a neighbour on the same host; LOCAL_GATHER passes messages on to neighbours unchanged.
    """

    SCATTER = "scatter"
    GATHER = "gather"
    PAIR = "pair"
    LOCAL_SCATTER = "local_scatter"
    LOCAL_GATHER = "local_gather"


class Greeting(NamedTuple):
    """What a rank tells all others when a step begins.

    Attributes:
        version: of the wire format.
        failed: 1 if this rank cannot use its quantizer, and will say why; otherwise 0.
        bits: level of the step; 32 means uncompressed.
        composition: checksum of all parameters, settings and world size, and of what else must agree in this step.
        step: its number, modulo 2^32.
        values: checksum of the parameters' values; 0 if they are not compared in this step.
    """

    version: int
    failed: int
    bits: float
    composition: int
    step: int
    values: int

    def to_bytes(self) -> bytes:
        return _GREETING.pack(*self._replace(bits=level_code(self.bits)))

    @classmethod
    def from_bytes(cls, data: bytes) -> Greeting:
        greeting = cls(*_GREETING.unpack(data))
        return greeting._replace(bits=level_of(int(greeting.bits)))


def checksum(text: str) -> int:
    """32 bits that tell two texts apart (CRC-32)."""
    return zlib.crc32(text.encode())
