"""How fast the arithmetic is on a GPU, against a copy within its memory and against plain torch operators.

`python launch/bench kernels --device cuda`, in two sizes. With many values what counts is the rate at which bytes move:
those that an operation has to read and to write, each once. (Below one bit, encoding reads its values a second time,
from the caches; that is not counted.) With one bucket's values what counts is the time of a call, which may well be
what Python takes to launch it. Calls go through several sets of tensors in turn: none finds its own in the L2 cache.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import cycle, islice
from typing import Any, NamedTuple

import torch

from bench.results import origin, typed
from common.errors import RunError
from common.markdown import markdown
from hvd_dyncomp import LEVELS, kernels
from hvd_dyncomp.kernels import block_bytes, decode_into, encode_into, portable, reduce_into
from hvd_dyncomp.kernels.scales import values_per_scale

COPY = "copy"
OPERATIONS = ("encode", "decode", "reduce 2")
BUCKET = 2**21  # values, 8 MiB: what training hands to one call
_QUANTIZED = LEVELS[:-1]
# Torch's operators need many times their arguments in memory; their rate is that of more values.
_REFERENCE_VALUES = 2**24
_REFERENCE_ROUNDS = 3
# A measurement takes about so long; and of more calls the GPU's queue is full, and launching waits for it.
_SECONDS, _MOST_CALLS = 0.02, 200
_CACHES = 4  # the sets of tensors are so many times as large as the L2 cache


class Timed(NamedTuple):
    """What to time, and how many bytes it reads and writes."""

    action: Callable[[], object]
    moved: int


class Took(NamedTuple):
    """Seconds of one call among many in a row: until the device has done it, and until it was queued."""

    device: float
    host: float


Clock = Callable[[Sequence[Callable[[], object]], int], Took]


def timed(
    device: str, values: int, block_size: int, seed: int, levels: Sequence[float] = _QUANTIZED
) -> dict[str, Timed]:
    """By name: the copy, and every operation by the kernels that serve the device, with tensors of their own."""
    gradient, residual, out = _tensors(device, values, seed)
    found = {COPY: Timed(lambda: out.copy_(gradient), 8 * values)}
    for bits in levels:
        of_scale = values_per_scale(bits, block_size)
        shape: dict[str, Any] = {"bits": bits, "block_size": of_scale}
        size = values // of_scale * block_bytes(bits, of_scale)
        sent, reduced = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
        found |= {
            f"{bits} encode": Timed(partial(encode_into, sent, [gradient], residual, **shape), 8 * values + size),
            f"{bits} decode": Timed(partial(decode_into, [out], [sent], **shape), 4 * values + size),
            f"{bits} reduce 2": Timed(
                partial(reduce_into, reduced, [sent, sent], residual, **shape), 4 * values + 3 * size
            ),
        }
    return found


def references(device: str, values: int, block_size: int, seed: int) -> dict[str, Timed]:
    """By name, with an asterisk: two of the operations by torch's."""
    gradient, residual, out = _tensors(device, values, seed)
    found: dict[str, Timed] = {}
    for bits in _QUANTIZED:
        of_scale = values_per_scale(bits, block_size)
        blocks = values // of_scale
        size = blocks * block_bytes(bits, of_scale)
        sent, last = torch.zeros(size, dtype=torch.uint8, device=device), (blocks, of_scale, bits)
        encode = partial(portable.encode_into, sent, [gradient], 0, residual, *last, 0)
        decode = partial(portable.decode_into, [out], 0, [sent], *last, 1.0)
        found |= {
            f"{bits} encode*": Timed(encode, 8 * values + size),
            f"{bits} decode*": Timed(decode, 4 * values + size),
        }
    return found


def _tensors(device: str, values: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A gradient, a residual, and room for what is decoded."""
    gradient = torch.randn(values, generator=torch.Generator(device).manual_seed(seed), device=device)
    return gradient, torch.zeros_like(gradient, dtype=torch.bfloat16), torch.zeros_like(gradient)


def sets(values: int, cache: int) -> int:
    """How many sets of so many values each are larger than a cache of so many bytes, by far. Gradients alone count."""
    return 1 + _CACHES * cache // (4 * values)


def on_device(actions: Sequence[Callable[[], object]], calls: int) -> Took:
    """What a call takes the current GPU, and this thread."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    clock = time.perf_counter()
    began.record()
    for action in islice(cycle(actions), calls):
        action()
    ended.record()
    queued = time.perf_counter() - clock
    ended.synchronize()
    return Took(began.elapsed_time(ended) / 1000 / calls, queued / calls)


def measure(alike: Sequence[Mapping[str, Timed]], rounds: int, clock: Clock = on_device) -> dict[str, Took]:
    """By name, medians over some rounds, in which all have their turns.

    Args:
        alike: the same with other tensors; calls go through them in turn.
        clock: what so many calls take.
    """
    actions = {name: [one[name].action for one in alike] for name in alike[0]}
    calls = {}
    for name, own in actions.items():
        clock(own, len(own))  # kernels are loaded, memory is found
        calls[name] = min(_MOST_CALLS, max(1, int(_SECONDS / clock(own, 2).device)))
    seen: dict[str, list[Took]] = {name: [] for name in actions}
    for _ in range(rounds):
        for name, own in actions.items():
            seen[name].append(clock(own, calls[name]))
    return {name: Took(*(statistics.median(part) for part in zip(*took, strict=True))) for name, took in seen.items()}


def compile_all(device: str, block_size: int) -> float:
    """Seconds until all kernels were compiled: a level in each of several processes.

    Triton keeps what they have compiled in its folder, where this process finds it.
    """
    began = time.perf_counter()
    # Not forked: a process that has used a GPU cannot do so again after a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(len(_QUANTIZED), os.cpu_count() or 1), context) as pool:
        list(pool.map(partial(_compile, device, block_size), _QUANTIZED))
    return time.perf_counter() - began


def _compile(device: str, block_size: int, bits: float) -> None:
    for one in timed(device, block_size, block_size, 0, (bits,)).values():
        one.action()  # which needs it compiled, but not done


def run(device: str, values: int, block_size: int, rounds: int, seed: int, clock: Clock = on_device) -> dict[str, Any]:
    """Measures on the current GPU; what `report` takes.

    Raises:
        RunError: its memory does not hold so many values.
    """
    compiled = compile_all(device, block_size)
    cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    made = partial(timed, device, block_size=block_size, seed=seed)
    try:
        many = [made(values) for _ in range(sets(values, cache))]
        moved = {name: one.moved for name, one in many[0].items()}
        rates = {name: moved[name] / took.device for name, took in measure(many, rounds, clock).items()}
        del many
        slow = references(device, min(values, _REFERENCE_VALUES), block_size, seed)
        took = measure([slow], min(rounds, _REFERENCE_ROUNDS), clock)
        rates |= {name: one.moved / took[name].device for name, one in slow.items()}
        del slow
        small = measure([made(BUCKET) for _ in range(sets(BUCKET, cache))], rounds, clock)
    except torch.OutOfMemoryError:
        raise RunError(f"the GPU's memory does not hold what {values} values need: --values takes fewer") from None
    return {
        "gpu": torch.cuda.get_device_name(),
        "kernels": kernels.backends[device].__name__.split(".")[-1],
        "values": values,
        "reference_values": min(values, _REFERENCE_VALUES),
        "block_size": block_size,
        "compiled_seconds": round(compiled, 1),
        "rates": rates,
        "bucket": {
            "values": BUCKET,
            "microseconds": {
                name: [round(1e6 * took.device, 2), round(1e6 * took.host, 2)] for name, took in small.items()
            },
        },
    }


def report(found: Mapping[str, Any]) -> str:
    """Markdown: of the copy's rate, the part that each operation reaches; and what a call takes with one bucket."""
    bucket, rates = found["bucket"], found["rates"]
    copied = bucket["microseconds"][COPY]
    return "\n\n".join(
        [
            f"`{typed(found['about']['command'])}`: on one {found['gpu']}, kernels: {found['kernels']}, compiled in "
            f"{found['compiled_seconds']:.0f} s.{origin([found['about']])}",
            f"{found['values']} values: bytes read and written per second, each counted once, as a part of those of a "
            f"copy ({rates[COPY] / 1e9:.0f} GB/s); in brackets: times as fast as the reference kernels there, with "
            f"{found['reference_values']} values.",
            _table(partial(_share, rates)),
            f"{bucket['values']} values, a bucket of {bucket['values'] >> 18} MiB: microseconds from one call to the "
            "next, of many in a row; in brackets: until a call has been launched, which is Python's time. A copy: "
            f"{copied[0]:.0f} ({copied[1]:.0f}).",
            _table(partial(_call, bucket["microseconds"])),
        ]
    )


def _share(rates: Mapping[str, float], name: str) -> str:
    theirs = rates.get(f"{name}*")
    return f"{rates[name] / rates[COPY]:.2f}" + (f" ({rates[name] / theirs:.0f})" if theirs else "")


def _call(microseconds: Mapping[str, Sequence[float]], name: str) -> str:
    device, host = microseconds[name]
    return f"{device:.0f} ({host:.0f})"


def _table(cell: Callable[[str], str]) -> str:
    rows = [(str(bits), *(cell(f"{bits} {operation}") for operation in OPERATIONS)) for bits in _QUANTIZED]
    return markdown(("bits", *OPERATIONS), rows)
