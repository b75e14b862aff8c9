"""Kernels in Triton, for tensors on GPUs: the operations of `hvd_dyncomp.kernels`, on checked arguments.

They make the same bits as the reference, in one launch per operation. A launch goes to the current stream of the
tensors' device and does not wait. `portable` takes blocks of more than 8192 values, which would not fit into registers.
A kernel is compiled at its first call for a level, and kept in Triton's cache.

In here `import triton` is the library, as all imports are absolute. Importing this package imports Triton; this happens
only with the first tensor on a GPU.

Tests without a GPU run the kernels in Triton's interpreter, and check what the compiler makes of them.
"""

import triton

if tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 4):
    raise ImportError(
        f"Triton {triton.__version__} is older than 3.4, the oldest version that these kernels were compiled with"
    )

from hvd_dyncomp.kernels.triton.operations import check, decode_into, encode_into, reduce_into

__all__ = ["check", "decode_into", "encode_into", "reduce_into"]
