"""Kernels compiled for another processor and run by an emulator, as a backend of `hvd_dyncomp.kernels`."""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch

from hvd_dyncomp.kernels import block_bytes
from hvd_dyncomp.levels import level_code

# Operation, blocks, block size, pieces, values to skip, versions, real values; level, whether there is a residual and
# its dither; factor. Behind it come the pieces' sizes, the pieces, the versions, the residual.
_REQUEST = struct.Struct("<7Qi2If")
_ENCODE, _DECODE, _REDUCE = range(3)


class Emulated:
    """The operations of a backend, answered by emulated.cpp in another process: what it returns is copied back."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    def encode_into(
        self,
        out: torch.Tensor,
        values: Sequence[torch.Tensor],
        first: int,
        residual: torch.Tensor | None,
        blocks: int,
        block_size: int,
        bits: float,
        dither: int,
    ) -> None:
        shape = {"blocks": blocks, "block_size": block_size, "bits": bits, "dither": dither}
        self._ask(_ENCODE, [out], values=values, first=first, residual=residual, **shape)

    def decode_into(
        self,
        values: Sequence[torch.Tensor],
        first: int,
        versions: Sequence[torch.Tensor],
        blocks: int,
        block_size: int,
        bits: float,
        factor: float,
    ) -> None:
        shape = {"blocks": blocks, "block_size": block_size, "bits": bits}
        self._ask(_DECODE, values, values=values, first=first, versions=versions, factor=factor, **shape)

    def reduce_into(
        self,
        out: torch.Tensor,
        versions: Sequence[torch.Tensor],
        residual: torch.Tensor | None,
        real: int,
        blocks: int,
        block_size: int,
        bits: float,
        dither: int,
    ) -> None:
        shape = {"blocks": blocks, "block_size": block_size, "bits": bits, "dither": dither}
        self._ask(_REDUCE, [out], versions=versions, residual=residual, real=real, **shape)

    def _ask(
        self,
        operation: int,
        results: Sequence[torch.Tensor],
        *,
        blocks: int,
        block_size: int,
        bits: float,
        values: Sequence[torch.Tensor] = (),
        first: int = 0,
        versions: Sequence[torch.Tensor] = (),
        residual: torch.Tensor | None = None,
        dither: int = 0,
        real: int = 0,
        factor: float = 1.0,
    ) -> None:
        """Sends a request, and writes the answer into `results` and `residual`."""
        assert all(version.numel() == blocks * block_bytes(bits, block_size) for version in versions)
        residuals = [] if residual is None else [residual]
        numbers: list[Any] = [operation, blocks, block_size, len(values), first, len(versions), real]
        numbers += [level_code(bits), len(residuals), dither, factor]
        sizes = struct.pack(f"<{len(values)}Q", *(piece.numel() for piece in values))
        assert self.process.stdin and self.process.stdout
        data = [bytes(tensor.view(-1).view(torch.uint8).numpy()) for tensor in chain(values, versions, residuals)]
        self.process.stdin.write(b"".join([_REQUEST.pack(*numbers), sizes, *data]))
        self.process.stdin.flush()
        for result in chain(results, residuals):
            answer = bytearray(self.process.stdout.read(result.numel() * result.element_size()))
            assert len(answer) == result.numel() * result.element_size(), "the emulated program ended"
            if answer:
                result.copy_(torch.frombuffer(answer, dtype=result.dtype).view_as(result))


@contextmanager
def running(command: Sequence[str]) -> Iterator[Emulated]:
    """A backend that `command`, a build of emulated.cpp, serves."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield Emulated(process)
            assert process.stdin
            process.stdin.close()
            assert process.wait(timeout=60) == 0
        finally:
            process.kill()
