"""What the part "growth" has to say: how well its model fits what was measured, and apart from that, predictions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from bench.cost_model import UNITS
from bench.results import origin, quartiles, typed
from bench.tables import rate_title, title
from common.markdown import DASH, markdown

# Of the layouts that are predicted, those in the tables; growth.json has all.
_HOSTS, _WORKERS = (2, 8, 32, 128), (1, 4, 8)
_ALLTOALLV = (
    "With 64 to 127 workers and with 256 to 1,023, Open MPI's alltoallv exchanges a message with every other rank in "
    "turn, also with those that get nothing (read from its source, not observed). Hence the long steps of 8x8, 32x8, "
    "128x4 and others; `OMPI_MCA_coll_tuned_use_dynamic_rules=1 OMPI_MCA_coll_tuned_alltoallv_algorithm=1` should "
    "avoid it."
)


def deviation(row: Mapping[str, Any]) -> float:
    """Predicted less measured, in percent of measured."""
    return 100 * (row["predicted_ms"] / row["ms"] - 1)


def constants(results: Mapping[str, Any]) -> str:
    """One row per constant."""
    rows: list[tuple[str, ...]] = [
        (f"`{name}`", f"{value:.3g}", f"{error:.1g}" if error else DASH, *UNITS[name])
        for name, (value, error) in results["constants"].items()
    ]
    return markdown(("constant", "fitted", "standard error", "unit", "of"), rows)


def residuals(rows: Sequence[Mapping[str, Any]]) -> str:
    """One row per method, one column per layout and rate: deviations."""
    places = list(dict.fromkeys((row["layout"], row["rate"]) for row in rows))
    names = list(dict.fromkeys(row["contender"] for row in rows))
    found = {(row["contender"], row["layout"], row["rate"]): f"{deviation(row):+.1f}" for row in rows}
    head = ("predicted less measured, %", *(f"{layout}, {rate_title(rate)}" for layout, rate in places))
    return markdown(head, [(title(name), *(found.get((name, *place), DASH) for place in places)) for name in names])


def spread(rows: Sequence[Mapping[str, Any]]) -> str:
    """How large the deviations are, in a sentence."""
    sizes = [abs(deviation(row)) for row in rows]
    middle = quartiles(sizes)[1]
    square = math.sqrt(sum(size**2 for size in sizes) / len(sizes))
    return f"{len(sizes)} points: median {middle:.1f} %, root mean square {square:.1f} %, largest {max(sizes):.1f} %."


def unseen(rows: Sequence[Mapping[str, Any]]) -> str:
    """One row per point that the fit has not seen."""
    cells: list[tuple[str, ...]] = [
        (
            f"{row['layout']}, {rate_title(row['rate'])}, {title(row['contender'])}",
            f"{row['ms']:.1f}",
            f"{row['predicted_ms']:.1f}",
            f"{deviation(row):+.1f}",
        )
        for row in rows
    ]
    return markdown(("not seen by the fit", "measured, ms", "predicted, ms", "deviation, %"), cells)


def measured(results: Mapping[str, Any]) -> list[str]:
    """Markdown: the constants and what they make of what was measured."""
    return [
        f"`{typed(results['command'])}`: launch/bench/cost_model.py, fitted to the median steps in the "
        "[tables](benchmarks.md) of the exchange over MPI (hosts x workers of each; least squares of relative errors). "
        "The times of the kernels are measured separately. The model adds the times of arithmetic and of transfers. "
        "Where the two overlap, as they do with two workers, real steps are shorter."
        f"{origin([results])}",
        constants(results),
        residuals(results["seen"]),
        f"Fitted, {spread(results['seen'])} Not seen, {spread(results['unseen'])}",
        unseen(results["unseen"]),
    ]


def _shown(row: Mapping[str, Any]) -> bool:
    return row["hosts"] in _HOSTS and row["workers"] in _WORKERS


def _layouts(results: Mapping[str, Any]) -> dict[tuple[int, int], dict[str, Mapping[str, Any]]]:
    found: dict[tuple[int, int], dict[str, Mapping[str, Any]]] = {}
    for row in filter(_shown, results["predicted"]):
        found.setdefault((row["hosts"], row["workers"]), {})[row["contender"]] = row
    return found


def sent(results: Mapping[str, Any]) -> str:
    """One row per layout, one column per method: what leaves a host."""
    layouts = _layouts(results)
    names = methods(results)
    rows = [
        (f"{hosts}x{workers}", *(f"{row[name]['leaving_bytes'] / 1e6:.1f}" for name in names))
        for (hosts, workers), row in layouts.items()
    ]
    return markdown(("MB that leave a host, hosts x workers", *map(title, names)), rows)


def methods(results: Mapping[str, Any]) -> list[str]:
    """Whose steps are predicted."""
    return list(dict.fromkeys(row["contender"] for row in results["predicted"]))


def times(results: Mapping[str, Any], rate: str) -> str:
    """One row per layout, one column per method: milliseconds a step, and in brackets with messages as assumed."""
    names = methods(results)
    rows = [
        (f"{hosts}x{workers}", *(_both(row[name], rate) for name in names))
        for (hosts, workers), row in _layouts(results).items()
    ]
    return markdown((f"ms per step, {rate_title(rate)}", *map(title, names)), rows)


def _both(row: Mapping[str, Any], rate: str) -> str:
    return f"{row['ms'][rate]:.0f} ({row['assumed_ms'][rate]:.0f})"


def messages(results: Mapping[str, Any]) -> str:
    """One row per bucket size."""
    rates = list(results["messages"][0]["fitted"]["ms"])
    head = ("bucket, MiB", "KB between hosts", "KB to a neighbour, from one", "messages a step", "ms of latency")
    rows = []
    for row in results["messages"]:
        size, fitted, assumed = row["bytes"], row["fitted"], row["assumed"]
        shares = [
            " / ".join(f"{100 * found['latency_ms'] / found['ms'][rate]:.0f}" for found in (fitted, assumed))
            for rate in rates
        ]
        neighbours = f"{size['scatter'] / 1e3:.1f}, {size['gather'] / 1e3:.1f}"
        latency = f"{fitted['latency_ms']:.0f} / {assumed['latency_ms']:.0f}"
        cells = (f"{size['between'] / 1e3:.2f}", neighbours, str(row["messages"]), latency)
        rows.append((str(row["bucket_mib"]), *cells, *shares))
    return markdown((*head, *(f"% of a step, {rate_title(rate)}" for rate in rates)), rows)


def predicted(results: Mapping[str, Any]) -> list[str]:
    """Markdown: tables of what nobody has measured."""
    values, assumed = results["values"] / 1e6, results["assumed_ms"]
    rates = list(results["predicted"][0]["ms"])
    largest = max(results["predicted"], key=lambda row: row["hosts"] * row["workers"])
    workers = largest["hosts"] * largest["workers"]
    ours = title(methods(results)[-1])
    return [
        f"Nothing below was measured. {values:.1f} million values, buckets of 8 MiB, one core per worker, links at the "
        f"payload rate of TCP. A step is the hand-over of ready gradients, the exchange and the update, one after the "
        f"other. In brackets: an assumed latency of {1e3 * assumed:g} µs per message instead of the fitted one. (The "
        f"fitted latency is that of shared cores, where a message waits until its receiver runs.) {_ALLTOALLV} "
        f"docs/data/bench/growth.json has all layouts.",
        sent(results),
        *(times(results, rate) for rate in rates),
        f"{workers} workers ({largest['hosts']}x{largest['workers']}), {ours}, hierarchical: bytes per message, "
        f"messages that a worker sends one after the other, and the latency of messages and collectives (as fitted / "
        f"with {1e3 * assumed:g} µs a message):",
        messages(results),
        bucket_advice(results),
    ]


def bucket_advice(results: Mapping[str, Any]) -> str:
    """Which bucket is the smallest that leaves less than half of a step to latency, in a sentence for each way."""
    said = []
    for name, words in (("fitted", "as fitted"), ("assumed", f"with {1e3 * results['assumed_ms']:g} µs a message")):
        found = []
        for rate in results["messages"][0][name]["ms"]:
            enough = [
                row["bucket_mib"] for row in results["messages"] if 2 * row[name]["latency_ms"] < row[name]["ms"][rate]
            ]
            found.append(f"{f'{enough[0]} MiB' if enough else 'none'} at {rate_title(rate)}")
        said.append(f"{words}: {', '.join(found)}")
    return f"The smallest bucket that leaves less than half of a step to latency, {'; '.join(said)}."
