"""Calls the operations of `kernels.triton` as on a GPU, but for the launches; prints how often a kernel was compiled.

    python tests/kernels/launched.py

A JSON object: compilations by kernel. For test_triton.py, in a process of its own: in the other one Triton interprets.
"""

import json

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from hvd_dyncomp import kernels
from hvd_dyncomp.kernels import Noise, block_bytes, decode_into, encode_into, reduce_into
from hvd_dyncomp.kernels.triton import operations, tiles

LEVELS = (4, 0.25)


class NoDriver:
    """All that Triton asks of a GPU's until it launches."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Unlaunched:
    """A kernel that is compiled for the arguments that it is called with, and no more."""

    def __init__(self, kernel) -> None:
        self._kernel = kernel

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self._kernel.run(*args, grid=grid, warmup=True, **kwargs)


def at(offset: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """At an address that is a multiple of little but the element's size."""
    return torch.zeros(size + offset, dtype=dtype)[offset:]


def call_everything(bits: float, offset: int, size: int, first: int) -> None:
    blocks = -(-size // 512)
    shape = {"bits": bits, "block_size": 512}
    values, residual = [at(offset, first + size, torch.float32)], at(offset, 512 * blocks, torch.float32)
    out, other = (at(offset, blocks * block_bytes(bits, 512), torch.uint8) for _ in range(2))
    encode_into(out, values, residual, first=first, **shape)
    encode_into(out, values, None, first=first, noise=Noise((offset, 2**32 - 1), 2**31), **shape)
    for versions in [other], [other, other.clone()]:
        reduce_into(out, versions, residual, real=size, **shape)
        decode_into(values, versions, first=first, factor=1 / (1 + offset), **shape)


def main() -> None:
    driver.set_active(NoDriver())
    launch = operations._launch
    operations._launch = lambda kernel, *args, **kwargs: launch(Unlaunched(kernel), *args, **kwargs)
    kernels.backends["cpu"] = operations
    for bits in LEVELS:
        for offset, size, first in (0, 512, 0), (1, 1, 1), (3, 5000, 16), (16, 8192, 17):
            call_everything(bits, offset, size, first)
    found = {kernel.__name__: len(kernel.device_caches[0][0]) for kernel in (tiles.encode, tiles.decode)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
