"""How fast the arithmetic is on a GPU, against a copy within its memory and against plain torch operators.

Part of `bench.py --part kernels` where there is a GPU. What counts is the rate at which bytes move: those that an
operation has to read and to write, each once, in the time that the device takes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from hvd_dyncomp import LEVELS, kernels
from hvd_dyncomp.kernels import Noise, block_bytes, decode_into, encode_into, portable, reduce_into

COPY = "copy"
REPEATED = 10  # within one measurement: a call takes Python as long as a few million values take the device
OPERATIONS = ("encode", "stochastic", "decode", "reduce 2")


class Contender(NamedTuple):
    """What to time, and how many bytes it reads and writes."""

    action: Callable[[], object]
    moved: int


def contenders(device: str, values: int, block_size: int, seed: int) -> dict[str, Contender]:
    """By name: the copy, and every operation by the kernels that serve the device and, with an asterisk, by torch's."""
    generator = torch.Generator().manual_seed(seed)
    gradient = torch.randn(values, generator=generator).to(device)
    residual, out = torch.zeros_like(gradient), torch.zeros_like(gradient)
    found = {COPY: Contender(lambda: out.copy_(gradient), 8 * values)}
    blocks, noise = values // block_size, Noise((seed & 0xFFFFFFFF, 1))
    for bits in LEVELS[:-1]:
        shape: dict[str, Any] = {"bits": bits, "block_size": block_size}
        size = blocks * block_bytes(bits, block_size)
        sent, reduced = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
        last = (blocks, block_size, bits)
        found |= {
            f"{bits} encode": Contender(partial(encode_into, sent, [gradient], residual, **shape), 12 * values + size),
            f"{bits} stochastic": Contender(
                partial(encode_into, reduced, [gradient], None, noise=noise, **shape), 4 * values + size
            ),
            f"{bits} decode": Contender(partial(decode_into, [out], [sent], **shape), 4 * values + size),
            f"{bits} reduce 2": Contender(
                partial(reduce_into, reduced, [sent, sent], residual, **shape), 8 * values + 3 * size
            ),
            f"{bits} encode*": Contender(
                partial(portable.encode_into, sent, [gradient], 0, residual, *last, None), 12 * values + size
            ),
            f"{bits} decode*": Contender(
                partial(portable.decode_into, [out], 0, [sent], *last, 1.0), 4 * values + size
            ),
        }
    return found


def on_device(action: Callable[[], object]) -> float:
    """Seconds that an action takes the current GPU."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    for _ in range(REPEATED):
        action()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) / 1000 / REPEATED


def measure(
    found: Mapping[str, Contender], rounds: int, seconds: Callable[[Callable[[], object]], float] = on_device
) -> dict[str, float]:
    """Per contender, bytes per second: the median of some rounds after a first one, in which kernels are compiled."""
    rates: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(rounds + 1):
        for name, contender in found.items():
            rates[name].append(contender.moved / seconds(contender.action))
    return {name: statistics.median(seen[1:]) for name, seen in rates.items()}


def report(found: Mapping[str, Any]) -> str:
    """Markdown: of the copy's rate, the part that each operation reaches; in brackets, how often the reference's."""
    rates = found["rates"]
    lines = [
        f"On {found['device']}, {found['values']} values, kernels: {found['kernels']}. Bytes read and written per "
        f"second, as a part of those of a copy ({rates[COPY] / 1e9:.0f} GB/s; in brackets: times as fast as the "
        "reference kernels there):",
        "",
        f"| bits | {' | '.join(OPERATIONS)} |",
        f"|---|{'---:|' * len(OPERATIONS)}",
    ]
    for bits in LEVELS[:-1]:
        cells = []
        for operation in OPERATIONS:
            rate, theirs = rates[f"{bits} {operation}"], rates.get(f"{bits} {operation}*")
            cells.append(f"{rate / rates[COPY]:.2f}" + (f" ({rate / theirs:.0f})" if theirs else ""))
        lines.append(f"| {bits} | {' | '.join(cells)} |")
    return "\n".join(lines)


def run(values: int, block_size: int, rounds: int, seed: int) -> dict[str, Any]:
    """Measures on the current GPU; what `report` takes."""
    rates = measure(contenders("cuda", values, block_size, seed), rounds)
    serving = kernels.backends["cuda"].__name__.split(".")[-1]
    return {"device": torch.cuda.get_device_name(), "values": values, "kernels": serving, "rates": rates}
