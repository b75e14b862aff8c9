"""Draws the benchmarks' figures and writes their tables, from whatever JSON files are there.

docs/tables/benchmarks.md is written whole; docs/benchmarks.md has some tables between marks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from bench import changing, gpu_kernels, growth, kernels, memory, plots, ratios, said, tables
from bench.gpus import on_gpus
from bench.results import FOLDER, Summary, load, origin
from bench.tables import rate_title
from common.docs import DATA, FIGURES, TABLES
from common.errors import RunError
from common.files import replace_text
from common.launcher import TORCHRUN
from common.markdown import filled

PAGE = "benchmarks.md"
FILLED = (PAGE, "will_it_pay.md")  # pages with tables between marks
_HEAD = (
    "# Benchmarks: all tables\n\nWritten by `make bench`. [Benchmarks](../benchmarks.md) has the summary, the "
    "machines and the settings."
)
_Files = list[dict[str, Any]]
_WITHOUT_MPI = {"gloo": "Gloo", TORCHRUN: "torchrun"}
_KINDS = ("exchange-", "training-", "memory")  # what the names of files begin with


def links(results: Mapping[str, Any]) -> str:
    """What the links carried, in a sentence."""
    reached = [
        f"{rate_title(rate)}: {note['payload_mbit']:.0f} Mbit/s"
        for rate, found in results["rates"].items()
        if (note := found.get("about", {})).get("payload_mbit")
    ]
    return f"Payload of a plain TCP transfer over the same links: {', '.join(reached)}." if reached else ""


def _by(described: Iterable[Mapping[str, Any]]) -> str:
    """What a title says of runs without MPI; files from before there were any do not name the launcher."""
    launchers = {found.get("about", {}).get("launcher") for found in described}
    return "".join(f", {shown}" for by, shown in _WITHOUT_MPI.items() if by in launchers)


def _by_launcher(results: Mapping[str, Any]) -> str:
    return _by(results["rates"].values())


def _heading(results: Mapping[str, Any], text: str) -> str:
    where = "On GPUs, " if on_gpus(results) else ""
    return f"## {where}{text}" if where else f"## {text[0].upper()}{text[1:]}"


def exchange_section(results: Mapping[str, Any]) -> list[str]:
    where = f"{results['model']}, {tables.layout_title(results)}{_by_launcher(results)}"
    parts = [_heading(results, f"the exchange alone: {where}"), tables.times(results), tables.gains(results)]
    return [*parts, tables.bits(results), tables.caption(results), links(results)]


def training_section(files: _Files, figures: Path) -> list[str]:
    by = _by_launcher(files[0])
    parts = [_heading(files[0], f"training steps{by}")]
    ending = by.replace(", ", "-").lower()
    for results in files:
        if results["model"] == "resnet18" and not on_gpus(results):
            plots.steps_by_link(results, figures / f"steps-resnet18{ending}.png")
        parts += [tables.times(results), tables.caption(results)]
    return parts


def sharded_section(results: Mapping[str, Any]) -> list[str]:
    parts = [f"## Shards within hosts: {results['model']}, {tables.layout_title(results)}", tables.times(results)]
    return [*parts, tables.bits(results), tables.caption(results), links(results)]


def _by_hosts(results: Mapping[str, Any]) -> tuple[int, int]:
    return tables.hosts_of(results)[1], results["workers"]


def _read(folder: Path, keep: Callable[[Mapping[str, Any]], bool]) -> list[_Files]:
    """The files that are to be kept: of the exchange, of training, of memory."""
    found = [[load(path) for path in sorted(folder.glob(f"{kind}*.json"))] for kind in _KINDS]
    exchanges, *others = ([one for one in files if keep(one)] for files in found)
    return [sorted(exchanges, key=_by_hosts), *others]


def _changing(folder: Path) -> _Files:
    return [load(path) for path in sorted(folder.glob("changing-*.json"))]


def report(folder: Path, figures: Path) -> str:
    """All tables of the JSON files in a folder; their figures go into another."""
    parts: list[str] = []
    if arithmetic := load(folder / kernels.FILE):
        parts += ["## Arithmetic", f"`python launch/bench kernels`: {kernels.report(arithmetic)}"]
    for gpus in (False, True):
        if gpus and (arithmetic := load(folder / kernels.GPU_FILE)):
            parts += ["## On GPUs, arithmetic", gpu_kernels.report(arithmetic)]
        exchanges, training, memories = _read(folder, lambda one, gpus=gpus: on_gpus(one) == gpus)  # type: ignore[misc]
        for results in exchanges:
            parts += exchange_section(results)
        one_worker = [one for one in training if tables.hosts_of(one)[1] == 1]
        for by in dict.fromkeys(map(_by_launcher, one_worker)):
            parts += training_section([one for one in one_worker if _by_launcher(one) == by], figures)
        for results in training:
            if results not in one_worker:
                parts += sharded_section(results)
        if not gpus and (grown := load(folder / growth.FILE)):
            parts += ["## More workers", growth.report(grown)]
        if not gpus and (moving := _changing(folder)):
            parts += ["## Links that change", *map(changing.report, moving)]
        for results in memories:
            parts += [_heading(results, f"memory{_by([results])}"), memory.report(results)]
            if not gpus and not _by([results]):
                plots.memories(results, figures / "memory.png")
    return "\n\n".join(part for part in parts if part)


def _stamped(table: str, files: _Files) -> str:
    """With when it was measured, and with which versions."""
    notes = (found.get("about", {}) for one in files for found in one["rates"].values())
    return f"{table}\n\n{origin(notes).strip()}".strip()


def shown(folder: Path) -> dict[str, str]:
    """The tables of docs/benchmarks.md by name, of what was measured on CPUs over MPI."""
    _, training, memories = _read(
        folder, lambda one: not on_gpus(one) and not _by(one.get("rates", {"": one}).values())
    )
    sharded = [one for one in training if tables.hosts_of(one)[1] > 1]
    training = sorted((one for one in training if one not in sharded), key=lambda one: -one["values"])
    named = {f"{one['model']}, shards": _stamped(ratios.by_sharding(one), [one]) for one in sharded}
    named["models"] = _stamped(ratios.by_model(training), training)
    for one in map(load, sorted(folder.glob(f"training-*-{TORCHRUN}.json"))):
        named[f"{one['model']}, DDP"] = f"{tables.times(one, Summary.middle)}\n\n{tables.caption(one, 'median')}"
    named["changing links"] = "\n\n".join(map(changing.report, _changing(folder)))
    if grown := load(folder / growth.FILE):
        named["growth"] = growth.report(grown)
    if probe := load(folder / said.FILE):
        named["what probe says"] = said.report(probe)
    return {**named, "memory": "\n\n".join(map(memory.report, memories))}


def draw(docs: Path) -> None:
    """Draw the figures of the JSON files in a documentation's folder, write the page of tables, and fill in those of
    other pages that are there.

    Raises:
        RunError: there are no results.
    """
    data, figures = docs / DATA / FOLDER.name, docs / FIGURES
    for folder in (figures, docs / TABLES):
        folder.mkdir(parents=True, exist_ok=True)
    text = report(data, figures)
    if not text:
        raise RunError(f"no results in {data}")
    replace_text(docs / TABLES / PAGE, f"{_HEAD}\n\n{text}\n")
    found = shown(data)
    for page in (docs / name for name in FILLED):
        if page.exists():
            replace_text(page, filled(page.read_text(encoding="utf-8"), found, "make bench"))
    print(f"wrote {', '.join(FILLED)}, and what is in {docs / TABLES} and {figures}")
