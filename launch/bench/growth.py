"""How cost grows with the workers: bytes, messages, arithmetic and memory of a step, counted on simulated ranks.

    python launch/bench growth --layouts 2x1,128x1,16x8

A layout is HOSTSxWORKERS, workers of each host. All ranks live in this process, so that everything is counted and
nothing extrapolated; what a step takes on a network of that size is not measured. Arithmetic is that of the kernels, on
one core. Writes DIR/growth.json and shows it as Markdown.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from bench.results import FOLDER, about, origin, save, typed
from common.markdown import markdown
from common.values import count, layout, listed
from hvd_dyncomp import Averager
from hvd_dyncomp.exchange.settings import Settings
from hvd_dyncomp.kernels import backends
from hvd_dyncomp.sessions.all_ranks import packed
from hvd_dyncomp.simulate import InProcessTransport, World

FILE = "growth.json"
_LAYOUTS = "2x1,8x1,32x1,128x1,2x8,4x8,16x8"
_TENSOR = 2**18  # values of each


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What this benchmark can be told, and its defaults."""
    parser.set_defaults(run=run)
    add = parser.add_argument
    add("--layouts", type=listed(layout), default=_LAYOUTS, metavar="HxL,...", help=f"default {_LAYOUTS}")
    add("--values", type=count, default=2**22, metavar="N", help="of the model (default 4194304)")
    add("--bits", type=float, default=4.0, metavar="B", help="level (default 4)")
    add("--output-dir", type=Path, default=FOLDER, metavar="DIR", help=f"where the JSON file goes (default {FOLDER})")


def run(args: argparse.Namespace) -> None:
    """Count, write the JSON file and show it as Markdown."""
    results: dict[str, Any] = {"benchmark": "growth", "values": args.values, "bits": args.bits}
    results |= {"about": about(args.command, 0, {}), "layouts": []}
    for hosts, workers in args.layouts:
        results["layouts"].append(counted(hosts, workers, args.values, args.bits))
        save(args.output_dir / FILE, results)
    print(report(results))


class _Clock:
    """Kernels that add up how long they take."""

    def __init__(self, kernels: Any) -> None:
        self._kernels, self.seconds = kernels, 0.0

    def __getattr__(self, name: str) -> Callable:
        return functools.partial(self._timed, getattr(self._kernels, name))

    def _timed(self, call: Callable, *arguments: Any) -> None:
        began = time.thread_time()
        call(*arguments)
        self.seconds += time.thread_time() - began


def counted(hosts: int, workers: int, values: int, bits: float) -> dict[str, Any]:
    """What the second step of so many ranks takes."""
    size = hosts * workers
    world = World(size, hosts=[rank // workers for rank in range(size)])
    lengths = [min(_TENSOR, values - first) for first in range(0, values, _TENSOR)]
    clock, own = _Clock(backends["cpu"]), backends["cpu"]

    def gradients(rank: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(rank)
        return [torch.randn(length, generator=generator) for length in lengths]

    named = [(str(i), one) for i, one in enumerate(gradients(size))]  # only their shapes count

    def first(transport: InProcessTransport) -> Averager:
        averager = Averager(named, bits, transport=transport)
        averager.mean_(gradients(transport.rank))
        return averager

    def second(transport: InProcessTransport) -> int:
        averagers[transport.rank].mean_(gradients(transport.rank))
        return packed(averagers[transport.rank].state_dict()).numel()

    backends["cpu"] = clock
    try:
        averagers = world.run(first)
        world.forget_counts()
        clock.seconds = 0.0
        kept = world.run(second)
    finally:
        backends["cpu"] = own
    buckets = -(-4 * values // Settings().bucket_bytes_among(size))
    return {
        **{"hosts": hosts, "workers": workers, "buckets": buckets},
        "bits_of_rank": 8 * sum(world.bytes_sent) / size / values,
        "bits_of_host": 8 * sum(world.bytes_leaving) / hosts / values,
        "messages": sum(world.messages_sent) / size / buckets,
        "nanoseconds": 1e9 * clock.seconds / size / values,
        "state_bytes": sum(kept) / size / values,
    }


_HEAD = (
    *("hosts x workers", "bits per value that a worker sends", "that leave a host", "messages a bucket and worker"),
    *("ns of arithmetic per value", "bytes of state per value"),
)


def report(results: Mapping[str, Any]) -> str:
    """As Markdown."""
    rows = [
        (
            f"{one['hosts']} x {one['workers']}",
            *(f"{one[key]:.2f}" for key in ("bits_of_rank", "bits_of_host")),
            *(f"{one['messages']:.0f}", f"{one['nanoseconds']:.1f}", f"{one['state_bytes']:.2f}"),
        )
        for one in results["layouts"]
    ]
    caption = (
        f"`{typed(results['about']['command'])}`: {results['bits']:g} bits, {results['values'] / 1e6:.1f} million "
        f"values, one step, counted on simulated ranks.{origin([results['about']])}"
    )
    return f"{markdown(_HEAD, rows)}\n\n{caption}"
