"""The arithmetic. `reference` is the specification, in plain torch operators, and runs on every device."""

from hvd_dyncomp.kernels.reference import Noise, block_bytes, decode, decode_sum, encode

__all__ = ["Noise", "block_bytes", "decode", "decode_sum", "encode"]
