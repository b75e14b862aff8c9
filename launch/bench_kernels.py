"""What the arithmetic of one step costs a worker, for two workers, on one core.

    python launch/bench_kernels.py

Prints, as Markdown, nanoseconds of CPU time per gradient value: the best of several rounds, all levels in turn.
`r.add_(g)` is the yardstick: one pass over the same memory.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable

import torch

from hvd_dyncomp import LEVELS
from hvd_dyncomp.kernels.reference import decode, decode_sum, encode

BLOCK_SIZE = 512


def one_step(gradient: torch.Tensor, residual: torch.Tensor, shard_residual: torch.Tensor, bits: int) -> None:
    """Encode one's own gradient, sum two versions of half of it, encode the sum, decode the mean."""
    payload = encode(gradient, residual, bits=bits, block_size=BLOCK_SIZE)
    half = payload[: len(payload) // 2]
    total = decode_sum(torch.stack([half, half]), bits=bits, block_size=BLOCK_SIZE)
    shard = encode(total, shard_residual, bits=bits, block_size=BLOCK_SIZE)
    decode(torch.cat([shard, shard]), bits=bits, block_size=BLOCK_SIZE, factor=0.5)


def cpu_seconds(action: Callable[[], object]) -> float:
    began = time.process_time()
    action()
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=int, default=2**18, help="gradient values (default 262144)")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    if args.values < 2 * BLOCK_SIZE or args.values % (2 * BLOCK_SIZE):
        parser.error(f"--values must be a multiple of {2 * BLOCK_SIZE}, got {args.values}")
    torch.set_num_threads(1)
    gradient, residual = torch.randn(args.values), torch.zeros(args.values)
    shard_residual, other = torch.zeros(args.values // 2), torch.zeros(args.values)
    best: dict[str, float] = {}
    for _ in range(args.rounds):
        actions: dict[str, Callable[[], object]] = {
            str(bits): functools.partial(one_step, gradient, residual, shard_residual, bits)
            for bits in LEVELS
            if bits < 32
        }
        actions["`r.add_(g)`"] = functools.partial(other.add_, gradient)
        for name, action in actions.items():
            best[name] = min(best.get(name, float("inf")), cpu_seconds(action))
    print("| bits | ns per value |\n|---|---:|")
    for name, seconds in best.items():
        print(f"| {name} | {1e9 * seconds / args.values:.2f} |")


if __name__ == "__main__":
    main()
