"""How fast the arithmetic is on one core, against plain torch operators and against one pass over memory.

    python launch/bench kernels
    python launch/bench kernels --device cuda    # on one GPU instead

Every round runs all of them once, in turn, and compares them within the round: a machine's slow spells meet all
alike. The yardstick is `r.add_(g)`, which reads both and writes one of them. The reference kernels are the same
arithmetic in torch operators. Gradients change from call to call, as in a training: of one gradient again and again the
residual grows to its bound, where encoding takes longer. Writes DIR/kernels.json.

On a GPU the yardstick is a copy within its memory; and what a call takes is measured with one bucket as well, where
launching may take longest. All kernels are compiled before, in as many processes as there are cores. Writes
DIR/kernels-cuda.json.
"""

from __future__ import annotations

import argparse
import itertools
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench import gpu_kernels
from bench.results import FOLDER, about, origin, save, suffix
from common.device import choose_alone
from common.markdown import markdown
from common.values import DEVICES, count, natural
from hvd_dyncomp import LEVELS
from hvd_dyncomp.kernels import block_bytes, decode_into, encode_into, native, reduce_into, reference
from hvd_dyncomp.kernels.scales import values_per_scale

FILE, GPU_FILE = (f"kernels{suffix(device)}.json" for device in ("cpu", "cuda"))
BLOCK_SIZE = 512
_VALUES = {"cpu": 2**25, "cuda": 2**27}
# Where a call's gradient begins in what was drawn.
_OFFSETS = range(0, 64 * BLOCK_SIZE, BLOCK_SIZE)
ADD, REFERENCE = "`r.add_(g)`", "reference encode, 4 bits"


def actions(values: int, seed: int) -> dict[str, tuple[Callable[[], object], int]]:
    """Per name, what to time and how many values it handles."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(values + _OFFSETS[-1], generator=generator)
    other, out = torch.zeros(values), torch.empty(values)
    offsets = itertools.cycle(_OFFSETS)

    def gradient() -> torch.Tensor:
        return drawn[(first := next(offsets)) : first + values]

    def residual() -> torch.Tensor:
        return torch.zeros(values, dtype=torch.bfloat16)

    def encode(payload: torch.Tensor, residual: torch.Tensor, **told: Any) -> None:
        encode_into(payload, [gradient()], residual, **told)

    of_reference = residual()
    found: dict[str, tuple[Callable[[], object], int]] = {
        ADD: (lambda: other.add_(gradient()), values),
        REFERENCE: (lambda: reference.encode(gradient(), of_reference, bits=4, block_size=128), values),
    }
    for bits in LEVELS[:-1]:
        size = values_per_scale(bits, BLOCK_SIZE)
        shape: dict[str, Any] = {"bits": bits, "block_size": size}
        payload = torch.empty(values // size * block_bytes(bits, size), dtype=torch.uint8)
        reduced, versions, own = torch.empty_like(payload), [payload, payload], residual()
        found |= {
            f"{bits} encode": (partial(encode, payload, own, **shape), values),
            f"{bits} decode": (partial(decode_into, [out], [payload], **shape), values),
            f"{bits} decode 2": (partial(decode_into, [out], versions, **shape), values),
            f"{bits} reduce 2": (partial(reduce_into, reduced, versions, residual(), **shape), values),
        }
    return found


def measure(values: int, rounds: int, seed: int) -> dict[str, list[float]]:
    """By name, nanoseconds per value in every round after a first one that warms up."""
    times: dict[str, list[float]] = {}
    timed = actions(values, seed)
    for _ in range(rounds + 1):
        for name, (action, handled) in timed.items():
            began = time.perf_counter()
            action()
            times.setdefault(name, []).append(1e9 * (time.perf_counter() - began) / handled)
    return {name: seen[1:] for name, seen in times.items()}


def faster(times: dict[str, list[float]], name: str, than: str) -> float:
    """How many times as fast as another: the median over rounds."""
    return statistics.median(b / a for a, b in zip(times[name], times[than], strict=True))


def table(times: dict[str, list[float]]) -> str:
    """Markdown: nanoseconds per value (median), and speed against the yardstick in brackets."""
    operations = ("encode", "decode", "decode 2", "reduce 2")
    rows: list[tuple[str, ...]] = []
    for bits in LEVELS[:-1]:
        names = [f"{bits} {operation}" for operation in operations]
        rows.append(
            (str(bits), *(f"{statistics.median(times[name]):.2f} ({faster(times, name, ADD):.2f})" for name in names))
        )
    return markdown(("bits", *operations), rows)


def report(found: Mapping[str, Any]) -> str:
    """Markdown: all that the program has to say about what it measured."""
    times = found["nanoseconds"]
    return (
        f"{found['values']} values, medians of {len(times[ADD])} rounds, instruction set {found['instructions']}; ns "
        f"per value (in brackets: speed against {ADD}, {statistics.median(times[ADD]):.2f} ns)\n\n{table(times)}\n\n"
        f"4 bits, encode: {faster(times, '4 encode', REFERENCE):.1f} times as fast as the reference kernels."
        f"{origin([found.get('about', {})])}"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What this benchmark can be told, and its defaults."""
    parser.set_defaults(run=run)
    add = parser.add_argument
    told = " and ".join(f"{values} on a {device}" for device, values in _VALUES.items())
    add("--values", type=_whole_blocks, metavar="N", help=f"gradient values (default {told})")
    add("--rounds", type=count, default=9, metavar="N", help="measured ones (default 9)")
    add("--seed", type=natural, default=0, help="of the gradients (default 0)")
    add("--device", choices=DEVICES, default="cpu", help="auto: a GPU where there is one (default cpu)")
    add("--output-dir", type=Path, default=FOLDER, metavar="DIR", help=f"where the JSON file goes (default {FOLDER})")


def _whole_blocks(text: str) -> int:
    values = count(text)
    if values % BLOCK_SIZE:
        raise argparse.ArgumentTypeError(f"{values} is not a multiple of {BLOCK_SIZE}")
    return values


def run(args: argparse.Namespace) -> None:
    """Measure, write the JSON file and show it as Markdown.

    Raises:
        RunError: a GPU is wished for, and there is none, or its memory is too small.
    """
    device = choose_alone(args.device)
    values = args.values or _VALUES[device]
    torch.set_num_threads(1)
    note = about(args.command, args.seed, {})
    if device == "cuda":
        found = {"about": note, **gpu_kernels.run(device, values, BLOCK_SIZE, args.rounds, args.seed)}
        save(args.output_dir / GPU_FILE, found)
        print(gpu_kernels.report(found))
        return
    times = measure(values, args.rounds, args.seed)
    variant = native.variants()[0] if native else "none: reference kernels"
    machine = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__, "seed": args.seed}
    found = {"about": note, **machine, "values": values, "instructions": variant, "nanoseconds": times}
    save(args.output_dir / FILE, found)
    print(report(found))
