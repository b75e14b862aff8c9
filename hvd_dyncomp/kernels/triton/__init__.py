"""Kernels in Triton, for tensors on GPUs: the operations of `hvd_dyncomp.kernels`, on checked arguments.

The same bits as the reference, in one launch an operation. A launch goes to the current stream of the tensors' device
and does not wait. Blocks of more than 8192 values, which would not fit into registers, are `portable`'s. A kernel is
compiled when it is first called for at a level, and kept in Triton's cache.

`import triton` in here is the library, as all imports are absolute. Importing this package imports it, and nothing does
before the first tensor on a GPU.

Never run on a GPU: tests run it in Triton's interpreter, and look at what the compiler makes of it.
"""

import triton

if tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 4):
    raise ImportError(
        f"Triton {triton.__version__} is older than 3.4, the oldest version that these kernels were compiled with"
    )

from hvd_dyncomp.kernels.triton.operations import check, decode_into, encode_into, reduce_into

__all__ = ["check", "decode_into", "encode_into", "reduce_into"]
