"""The arithmetic of quantization.

`reference` is the specification, in plain torch operators, for every device. `native` is the same in C++, bit for bit,
for tensors on the CPU; `triton` is the same for GPUs. `backends` has the kernels in use, by type of device.

Kernels work in the caller's memory: a gradient is read and written where autograd left it, and a message is built where
it is sent from. `values` is a sequence of contiguous float32 tensors of any shape, the parameters of a bucket. It
stands for the concatenation of their elements, followed by endless zeros.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from hvd_dyncomp.checks import finite, shown
from hvd_dyncomp.kernels import portable
from hvd_dyncomp.kernels.reference import RESIDUAL_DTYPE, dither_from
from hvd_dyncomp.kernels.scales import block_bytes, scales
from hvd_dyncomp.levels import LEVELS, UNCOMPRESSED

logger = logging.getLogger(__name__)

native: Any
try:
    from hvd_dyncomp.kernels import native
except ImportError as error:  # logged at the first tensor: reports about runs have none
    native, _why = None, {"cpu": str(error)}
else:
    _why = {}  # by type of device, why the reference serves it

# By type of device ("cuda"): a module with the three operations below, on checked arguments, as in `portable`. Without
# an entry `portable` is used. The entry for GPUs is made at the first tensor on one.
backends: dict[str, Any] = {} if native is None else {"cpu": native}

__all__ = [
    "RESIDUAL_DTYPE",
    "backends",
    "block_bytes",
    "decode_into",
    "dither_from",
    "encode_into",
    "reduce_into",
    "scales",
]

BLOCK_SIZES = frozenset(2**exponent for exponent in range(6, 17))
_MOST_VALUES = 2**62  # limit of an index: far below C's size_t


def encode_into(
    out: torch.Tensor,
    values: Sequence[torch.Tensor],
    residual: torch.Tensor | None,
    *,
    bits: float,
    block_size: int,
    first: int = 0,
    dither: int = 0,
) -> None:
    """Quantize n values + residual into `out`; what is lost becomes the new residual (equations 1, 1a and 1b).

    Everything after the last value is padding: it has no residual, and counts in no block's mean. Blocks whose values
    are all zero are sent as zeros, and their residual stays.

    Args:
        out: (n / block_size * block_bytes(bits, block_size),) uint8, overwritten.
        values: see the module.
        residual: (n,) bfloat16, updated in place; None for no error feedback.
        bits: a level below 32.
        block_size: values per block, a power of two from 64 to 65536.
        first: index of the first of the n values; default 0.
        dither: a word of 32 bits that decides how the new residual is rounded (`reference.stored`). It must differ in
            every step, or small gradients may be lost.

    Raises:
        ValueError, TypeError: an argument has another type, dtype, size or device, or is not contiguous; the message
            names it.
    """
    blocks = _blocks("out", out, bits, block_size)
    _check_values(values, first, out)
    _check_dither(dither)
    if residual is not None:
        _check("residual", residual, RESIDUAL_DTYPE, blocks * block_size, out)
    _backend(out).encode_into(out, values, first, residual, blocks, block_size, bits, dither)


def decode_into(
    values: Sequence[torch.Tensor],
    versions: Sequence[torch.Tensor],
    *,
    bits: float,
    block_size: int,
    first: int = 0,
    factor: float = 1.0,
) -> None:
    """Write the sum of `versions`, decoded, times `factor` (equations 4 and 5).

    Args:
        values: the output, see the module; what falls after the last value is dropped.
        versions: one or more (n / block_size * block_bytes(bits, block_size),) uint8, added in this order.
        bits, block_size: as in `encode_into`.
        first: index of the first of the n values; default 0.
        factor: multiplied into the scales, in float32.

    Raises:
        ValueError, TypeError: as in `encode_into`.
    """
    blocks = _check_versions(versions, bits, block_size)
    _check_values(values, first, versions[0])
    factor = finite("factor", factor)
    _backend(versions[0]).decode_into(values, first, versions, blocks, block_size, bits, factor)


def reduce_into(
    out: torch.Tensor,
    versions: Sequence[torch.Tensor],
    residual: torch.Tensor | None,
    *,
    bits: float,
    block_size: int,
    real: int | None = None,
    dither: int = 0,
) -> None:
    """Decode and sum `versions`, and quantize the sum + residual into `out` (equations 5, 1, 1a and 1b).

    Args:
        out, residual, bits, block_size, dither: as in `encode_into`.
        versions: as in `decode_into`; `out` may not overlap them.
        real: number of the n values that are not padding; None, or more than n, for all.

    Raises:
        ValueError, TypeError: as in `encode_into`.
    """
    blocks = _check_versions(versions, bits, block_size)
    _check_dither(dither)
    _check("out", out, torch.uint8, blocks * block_bytes(bits, block_size), versions[0])
    if residual is not None:
        _check("residual", residual, RESIDUAL_DTYPE, blocks * block_size, out)
    if real is None:
        real = blocks * block_size
    elif not isinstance(real, int) or real is True or not 0 <= real < _MOST_VALUES:
        raise ValueError(f"real must be a whole number that is not negative, got {shown(real)}")
    _backend(out).reduce_into(out, versions, residual, real, blocks, block_size, bits, dither)


def _backend(tensor: torch.Tensor) -> Any:
    return _backend_of("cpu" if tensor.is_cpu else tensor.device.type)  # reading a device is slow


def _backend_of(kind: str) -> Any:
    if kind == "cuda" and kind not in backends:
        backends[kind] = _for_gpus()
    if kind == "cpu" and native is None and kind not in backends:
        backends[kind] = _without_native()
    return backends.get(kind, portable)


def _without_native() -> Any:
    logger.warning(
        "the native kernels are missing (%s); the reference kernels run instead, much more slowly. To build the native "
        "ones, install a C++ compiler, then the package once more, from a clone by 'pip install --no-cache-dir "
        "--force-reinstall --no-deps .': pip may have kept a build without them",
        _why["cpu"],
    )
    return portable


def served_by(kind: str) -> str:
    """What serves tensors on a type of device ("cpu", "cuda"), in words; if it is the reference, with the reason."""
    backend = _backend_of(kind)
    if backend is portable:
        return f"the reference in torch operators, which is slow: {_why[kind]}"
    return f"C++, {native.variants()[0]}" if backend is native else "Triton"


def _for_gpus() -> Any:
    """The kernels for GPUs. Importing Triton takes as long as importing this package, so only GPU users pay for it."""
    try:
        from hvd_dyncomp.kernels import triton

        triton.check()
    except (ImportError, RuntimeError) as error:
        _why["cuda"] = str(error).strip().split("\n")[0]
        logger.warning(
            "the Triton kernels cannot run on this GPU (%s); the reference kernels run instead, more slowly.",
            _why["cuda"],
        )
        return portable
    return triton


# These checks run for every small bucket of every step, and the native kernels trust the addresses after them.


def _check_values(values: Sequence[torch.Tensor], first: int, payload: torch.Tensor) -> None:
    if not isinstance(first, int) or not 0 <= first < _MOST_VALUES:
        raise ValueError(f"first must be a whole number that is not negative, got {shown(first)}")
    if not isinstance(values, (list, tuple)):  # a generator would be empty after this check
        raise TypeError(f"values must be a list or a tuple of tensors, got {shown(values)}")
    on_cpu = payload.is_cpu
    for tensor in values:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"values must be tensors, got {shown(tensor)}")
        if tensor.dtype is not torch.float32 or not tensor.is_contiguous() or not (tensor.is_cpu and on_cpu):
            _check("values", tensor, torch.float32, tensor.numel(), payload)


def _check_versions(versions: Sequence[torch.Tensor], bits: float, block_size: int) -> int:
    """Check them; return the number of blocks in each."""
    if not isinstance(versions, (list, tuple)) or not versions:
        raise ValueError(f"versions must be a list or a tuple of one or more tensors, got {shown(versions)}")
    blocks = _blocks("versions", versions[0], bits, block_size)
    size = blocks * block_bytes(bits, block_size)
    for version in versions[1:]:
        _check("versions", version, torch.uint8, size, versions[0])
    return blocks


def _blocks(name: str, payload: torch.Tensor, bits: float, block_size: int) -> int:
    """Check `payload`; return its number of blocks."""
    # Check the type, too: 4.0 is a key of the tables, but no number of bits to shift by; and True == 1.
    plain = isinstance(bits, float) and bits < 1 or isinstance(bits, int) and bits is not True
    if not plain or bits not in LEVELS or bits == UNCOMPRESSED:
        raise ValueError(f"bits must be a level below 32, got {shown(bits)}")
    if not isinstance(block_size, int) or block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size must be a power of two from 64 to 65536, got {shown(block_size)}")
    if not isinstance(payload, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {shown(payload)}")
    size = block_bytes(bits, block_size)
    blocks, rest = divmod(payload.numel(), size)
    if rest:
        raise ValueError(f"{name} must be blocks of {size} bytes, got {payload.numel()} bytes")
    _check(name, payload, torch.uint8, blocks * size, payload)
    return blocks


def _check_dither(dither: int) -> None:
    if not isinstance(dither, int) or not 0 <= dither < 2**32:
        raise ValueError(f"dither must be a word of 32 bits, got {shown(dither)}")


def _check(name: str, tensor: torch.Tensor, dtype: torch.dtype, size: int, near: torch.Tensor) -> None:
    """Check a tensor; `near`: a tensor on the device that it must be on."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {shown(tensor)}")
    if tensor.dtype is not dtype or tensor.numel() != size or not tensor.is_contiguous():
        got = f"{tensor.numel()} of {tensor.dtype}{'' if tensor.is_contiguous() else ', not contiguous'}"
        raise ValueError(f"{name} must be {size} contiguous elements of {dtype}, got {got}")
    if not (tensor.is_cpu and near.is_cpu) and tensor.device != near.device:
        raise ValueError(f"{name} must be on {near.device} as the other tensors are, got {tensor.device}")
