"""The operations of `hvd_dyncomp.kernels` as launches, on checked arguments: nothing here waits for the device."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import Any

import torch
import triton
from triton.runtime import driver

from hvd_dyncomp.kernels import portable
from hvd_dyncomp.kernels.triton import tiles
from hvd_dyncomp.kernels.triton.form import Form, form_of

LARGEST_BLOCK = 8192  # the registers of a multiprocessor should hold no larger tile


def check() -> None:
    """Check that Triton can compile for a GPU here: its launchers need a C compiler.

    Raises:
        RuntimeError: it cannot, or the GPU is AMD's; the message says why.
    """
    # torch calls AMD's GPUs "cuda", too. On most of them a warp has 64 lanes, and nobody has checked which arithmetic
    # Triton's compiler for them chooses for these kernels.
    if torch.version.hip is not None:
        raise RuntimeError("they are for NVIDIA GPUs, and this torch is built for AMD GPUs (ROCm)")
    try:
        driver.active.get_current_target()
    except (AssertionError, OSError, subprocess.SubprocessError) as error:  # Triton's own build tools raise these
        raise RuntimeError(f"Triton cannot build the launcher of a kernel: {error}") from error


def encode_into(
    out: torch.Tensor,
    values: Sequence[torch.Tensor],
    first: int,
    residual: torch.Tensor | None,
    blocks: int,
    block_size: int,
    bits: float,
    dither: int,
) -> None:
    if block_size > LARGEST_BLOCK:
        return portable.encode_into(out, values, first, residual, blocks, block_size, bits, dither)
    tensors = _tensors(values)
    real = max(0, tensors[-1] - first)
    rest = (residual, real, blocks, block_size, bits, dither)
    return _encode(out, tensors, len(tensors) // 2, first, *rest, False)


def decode_into(
    values: Sequence[torch.Tensor],
    first: int,
    versions: Sequence[torch.Tensor],
    blocks: int,
    block_size: int,
    bits: float,
    factor: float,
) -> None:
    if block_size > LARGEST_BLOCK:
        return portable.decode_into(values, first, versions, blocks, block_size, bits, factor)
    if blocks == 0:
        return None
    tensors = _tensors(values)
    table = _upload([*tensors, *_addresses(versions)], versions[0])
    known = (table, len(tensors) // 2, first, len(versions), blocks, factor)
    return _launch(tiles.decode, versions[0], blocks, form_of(bits, block_size), *known)


def reduce_into(
    out: torch.Tensor,
    versions: Sequence[torch.Tensor],
    residual: torch.Tensor | None,
    real: int,
    blocks: int,
    block_size: int,
    bits: float,
    dither: int,
) -> None:
    if block_size > LARGEST_BLOCK:
        return portable.reduce_into(out, versions, residual, real, blocks, block_size, bits, dither)
    addresses = _addresses(versions)
    rest = (residual, real, blocks, block_size, bits, dither)
    return _encode(out, addresses, len(addresses), 0, *rest, True)


def _encode(
    out: torch.Tensor,
    numbers: list[int],
    entries: int,
    first: int,
    residual: torch.Tensor | None,
    real: int,
    blocks: int,
    block_size: int,
    bits: float,
    dither: int,
    from_versions: bool,
) -> None:
    if blocks == 0:  # a shard of a bucket with fewer blocks than workers
        return
    own = out if residual is None else residual.view(torch.int16)
    known = (out, _upload(numbers, out), entries, first, own, _word(dither), real, blocks)
    kind = {"FROM_VERSIONS": from_versions, "RESIDUAL": residual is not None}
    _launch(tiles.encode, out, blocks, form_of(bits, block_size), *known, **kind)


def _launch(kernel: Any, near: torch.Tensor, blocks: int, form: Form, *known: Any, **constants: Any) -> None:
    """Launches on the current stream of the device of `near`."""
    with torch.cuda.device_of(near):  # nothing, where that is no GPU
        kernel[(triton.cdiv(blocks, form.rows),)](*known, FORM=form, **constants, **options(form))


def options(form: Form) -> dict[str, Any]:
    """Options for Triton's compiler. Without fused multiply-add, which would give other bits."""
    return {"num_warps": form.warps, "enable_fp_fusion": False}


def _tensors(values: Sequence[torch.Tensor]) -> list[int]:
    """The table of `memory`."""
    addresses, starts, start = [], [], 0
    for tensor in values:
        size = tensor.numel()
        if size:
            addresses.append(tensor.data_ptr())
            starts.append(start)
            start += size
    return [*addresses, *starts, start]


def _addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def _upload(numbers: list[int], near: torch.Tensor) -> torch.Tensor:
    """(len(numbers),) int64 on the device of `near`. Pinned memory, or else the copy would wait for the device."""
    pinned = torch.tensor(numbers, dtype=torch.int64, device="cpu", pin_memory=near.is_cuda)
    return pinned.to(near.device, non_blocking=True)


def _word(number: int) -> int:
    """The lowest 32 bits, as a signed integer: a larger number would get another type from Triton."""
    return (number + 2**31) % 2**32 - 2**31
