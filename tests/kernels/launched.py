"""Calls the operations of `kernels.triton` as on a GPU, but for the launches; prints how often a kernel was compiled.

    python tests/kernels/launched.py

A JSON object: compilations by kernel. For test_triton.py, in a process of its own: in the other one Triton interprets.
"""

import json

from calls import CALLS, call_everything
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from hvd_dyncomp import kernels
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


def main() -> None:
    driver.set_active(NoDriver())
    launch = operations._launch
    operations._launch = lambda kernel, *args, **kwargs: launch(Unlaunched(kernel), *args, **kwargs)
    kernels.backends["cpu"] = operations
    for bits in LEVELS:
        for call in CALLS:
            call_everything(bits, *call, device="cpu")
    found = {kernel.__name__: len(kernel.device_caches[0][0]) for kernel in (tiles.encode, tiles.decode)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
