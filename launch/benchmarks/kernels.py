"""How fast the arithmetic is on one core, against plain torch operators and against one pass over memory.

    python launch/bench_kernels.py

Every round runs all contenders once, in turn, and compares them within the round: a machine's slow spells meet all
alike. The yardstick is `r.add_(g)`, which reads both and writes one of them. The reference kernels are the same
arithmetic in torch operators.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hvd_dyncomp import LEVELS
from hvd_dyncomp.kernels import Noise, block_bytes, decode_into, encode_into, native, reduce_into, reference

BLOCK_SIZE = 512
ADD, REFERENCE = "`r.add_(g)`", "reference encode, 4 bits"


def contenders(values: int, seed: int) -> dict[str, tuple[Callable[[], object], int]]:
    """Per name, what to time and how many values it handles."""
    generator = torch.Generator().manual_seed(seed)
    gradient, other = torch.randn(values, generator=generator), torch.zeros(values)
    residual, out = torch.zeros(values), torch.empty(values)
    found: dict[str, tuple[Callable[[], object], int]] = {
        ADD: (lambda: other.add_(gradient), values),
        REFERENCE: (lambda: reference.encode(gradient, residual, bits=4, block_size=BLOCK_SIZE), values),
    }
    for bits in LEVELS[:-1]:
        shape: dict[str, Any] = {"bits": bits, "block_size": BLOCK_SIZE}
        payload = torch.empty(values // BLOCK_SIZE * block_bytes(bits, BLOCK_SIZE), dtype=torch.uint8)
        reduced, versions = torch.empty_like(payload), [payload, payload]
        noise = Noise((seed & 0xFFFFFFFF, 1))
        found |= {
            f"{bits} encode": (partial(encode_into, payload, [gradient], residual, **shape), values),
            f"{bits} stochastic": (partial(encode_into, reduced, [gradient], residual, noise=noise, **shape), values),
            f"{bits} decode": (partial(decode_into, [out], [payload], **shape), values),
            f"{bits} decode 2": (partial(decode_into, [out], versions, **shape), values),
            f"{bits} reduce 2": (partial(reduce_into, reduced, versions, residual, **shape), values),
        }
    return found


def measure(values: int, rounds: int, seed: int) -> dict[str, list[float]]:
    """Per contender, nanoseconds per value in every round after a first one that warms up."""
    times: dict[str, list[float]] = {}
    actions = contenders(values, seed)
    for _ in range(rounds + 1):
        for name, (action, handled) in actions.items():
            began = time.perf_counter()
            action()
            times.setdefault(name, []).append(1e9 * (time.perf_counter() - began) / handled)
    return {name: seen[1:] for name, seen in times.items()}


def faster(times: dict[str, list[float]], name: str, than: str) -> float:
    """How many times as fast as another: the median over rounds."""
    return statistics.median(b / a for a, b in zip(times[name], times[than], strict=True))


def table(times: dict[str, list[float]]) -> str:
    """Markdown: nanoseconds per value (median), and speed against the yardstick in brackets."""
    operations = ("encode", "stochastic", "decode", "decode 2", "reduce 2")
    lines = [f"| bits | {' | '.join(operations)} |", f"|---|{'---:|' * len(operations)}"]
    for bits in LEVELS[:-1]:
        names = [f"{bits} {operation}" for operation in operations]
        cells = [f"{statistics.median(times[name]):.2f} ({faster(times, name, ADD):.2f})" for name in names]
        lines.append(f"| {bits} | {' | '.join(cells)} |")
    return "\n".join(lines)


def report(found: Mapping[str, Any]) -> str:
    """Markdown: all that the program has to say about what it measured."""
    times = found["nanoseconds"]
    return (
        f"{found['values']} values, medians of {len(times[ADD])} rounds, instruction set {found['instructions']}; ns "
        f"per value (in brackets: speed against {ADD}, {statistics.median(times[ADD]):.2f} ns)\n\n{table(times)}\n\n"
        f"4 bits, encode: {faster(times, '4 encode', REFERENCE):.1f} times as fast as the reference kernels."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=int, default=2**25, help="gradient values (default 33554432)")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all times there as well")
    args = parser.parse_args()
    if args.values < BLOCK_SIZE or args.values % BLOCK_SIZE:
        parser.error(f"--values {args.values}: must be a positive multiple of {BLOCK_SIZE}")
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: must be at least 1")
    torch.set_num_threads(1)
    times = measure(args.values, args.rounds, args.seed)
    variant = native.variants()[0] if native else "none: reference kernels"
    about = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__, "seed": args.seed}
    found = {**about, "values": args.values, "instructions": variant, "nanoseconds": times}
    print(report(found))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
