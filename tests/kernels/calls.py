"""Calls each operation of `kernels` once, in memory of exact size at addresses that are multiples of little.

    compute-sanitizer --tool memcheck python -P tests/kernels/calls.py    # on a machine with a GPU

Tests call this as well, where a kernel is only compiled. What comes of the calls is others' to check.
"""

import torch

from hvd_dyncomp.kernels import block_bytes, decode_into, encode_into, reduce_into

CALLS = [(0, 512, 0), (1, 1, 1), (3, 5000, 16), (16, 8192, 17)]  # offset, size, first


def at(offset: int, size: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """At an address that is a multiple of little but the element's size."""
    return torch.zeros(size + offset, dtype=dtype, device=device)[offset:]


def call_everything(bits: float, offset: int, size: int, first: int, device: str) -> None:
    blocks = -(-size // 512)
    shape = {"bits": bits, "block_size": 512}
    values = [at(offset, first + size, torch.float32, device).normal_()]
    residual = at(offset, 512 * blocks, torch.bfloat16, device).normal_()
    out, other = (at(offset, blocks * block_bytes(bits, 512), torch.uint8, device) for _ in range(2))
    encode_into(out, values, residual, first=first, dither=2**32 - 1, **shape)
    encode_into(out, values, None, first=first, **shape)
    for versions in [other], [other, other.clone()]:
        reduce_into(out, versions, residual, real=size, **shape)
        decode_into(values, versions, first=first, factor=1 / (1 + offset), **shape)


if __name__ == "__main__":
    for level in (0.125, 0.25, 1, 3, 4, 16):
        for call in CALLS:
            call_everything(level, *call, device="cuda")
    torch.cuda.synchronize()
