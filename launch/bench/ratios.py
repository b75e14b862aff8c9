"""What the first tables of docs/benchmarks.md hold: how many times as long as ours the steps of others take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench import tables
from bench.results import Summary
from bench.sharded import NATIVE, OURS_SHARDED, SHARDS_ALONE
from bench.tables import rate_title, summaries, title
from common.markdown import DASH, markdown

_OTHERS = ("none", "fp16", "powersgd1")
_LEVELS = ("4bit", "0.25bit")  # where there is room for two only


def ratio(found: Mapping[str, Summary], name: str, other: str) -> str:
    """Median of the other's steps by that of `name`, bold where `name` is slower; a dash where one was not measured."""
    if name not in found or other not in found:
        return DASH
    times = found[other].median / found[name].median
    text = f"{times:.1f}" if times >= 10 else f"{times:.2f}"
    return f"**{text}**" if float(text) < 1 else text


def by_sharding(results: Mapping[str, Any]) -> str:
    """One row per other of FSDP2 and rate, one column per level of ours; all with parameters sharded within hosts."""
    rates = summaries(results)
    levels = [name for name in tables.methods_of(rates) if name in OURS_SHARDED]
    rows = [
        (title(other), rate_title(rate), *(ratio(found, name, other) for name in levels))
        for other in (*NATIVE, SHARDS_ALONE)
        for rate, found in rates.items()
    ]
    return markdown(("against", "link", *map(title, levels)), rows)


def by_model(files: Sequence[Mapping[str, Any]]) -> str:
    """One row per file and rate, one column per level and other."""
    rows = [
        (_model(results), rate_title(rate), *(ratio(found, name, other) for name in _LEVELS for other in _OTHERS))
        for results in files
        for rate, found in summaries(results).items()
    ]
    head = [f"{title(name).removeprefix('ours, ')}: {title(other)}" for name in _LEVELS for other in _OTHERS]
    return markdown(("model", "link", *head), rows)


def _model(results: Mapping[str, Any]) -> str:
    return f"{results['model']}, {results['values'] / 1e6:.1f} million values"
