"""What the probe has found, in a table and in a sentence of advice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from hvd_dyncomp.commands.probe.methods import ALONE, DDP, HOROVOD

_TITLES = {
    "none": "Horovod float32",
    "fp16": "Horovod fp16",
    "ddp": "DDP float32",
    "ddp-fp16": "DDP fp16 hook",
    "ddp-bf16": "DDP bf16 hook",
    "powersgd1": "DDP PowerSGD, rank 1",
    "powersgd4": "DDP PowerSGD, rank 4",
}
_PLAIN = ("none", "fp16", "ddp", "ddp-fp16", "ddp-bf16")  # nothing to know and nothing to tune
_SAME = 1.05  # less is noise
_MUCH = 1.5  # what few bits must gain over the recommended level, to be worth changes of the optimizer
_WHOLE_MOMENTUM = 3  # bits, from which on an optimizer keeps its momentum
RECOMMENDED = 4.0


def level_of(method: str) -> float | None:
    """The bits of a method of this package; None for the others."""
    number, found, _ = method.partition("bit")
    return float(number) if found else None


def title(method: str) -> str:
    """How tables call a method."""
    level = level_of(method)
    if level is None:
        return _TITLES[method]
    return f"hvd_dyncomp, {bits(level)}"


@dataclass(frozen=True)
class Row:
    """What one method adds to a step.

    Attributes:
        ms: median of what its steps take longer than those without an exchange.
        low, high: quartiles of the same.
        megabytes: that a host's interface sends in a step; None if that was not counted.
    """

    ms: float
    low: float
    high: float
    megabytes: float | None

    def surely_faster(self, than: Row) -> bool:
        """Whether it is faster by more than noise."""
        return self.high < than.low and max(self.ms, 0) * _SAME < than.ms

    def gain(self, by: Row) -> float:
        """How much shorter a step gets by another method that is surely faster, in ms."""
        return self.ms - max(by.ms, 0)


def rows(measured: Mapping[str, Any]) -> dict[str, Row]:
    """Rows by method.

    Args:
        measured: as `turns.measure` returns it, with the steps without an exchange.
    """
    alone = median(measured[ALONE]["ms"])
    found = {}
    for name, samples in measured.items():
        if name != ALONE:
            low, middle, high = (each - alone for each in quantiles(samples["ms"], method="inclusive"))
            sent = [sum(hosts) / len(hosts) for hosts in samples["sent"]]
            found[name] = Row(middle, low, high, median(sent) / 1e6 if sent else None)
    return found


def best_plain(found: Mapping[str, Row]) -> str:
    """The fastest of the framework's own methods that need no tuning: float32, and 16 bits."""
    return min((name for name in _PLAIN if name in found), key=lambda name: found[name].ms)


def table(found: Mapping[str, Row]) -> str:
    """Rows as text, with their ratio to the best of the framework's own."""
    best = best_plain(found)
    lines = [f"{'':24}{'ms added to a step':>20}{'quartiles':>20}{'MB a host sends':>18}{'times as fast':>16}"]
    for name, row in found.items():
        sent = "-" if row.megabytes is None else f"{row.megabytes:.2f}"
        times = "-" if min(row.ms, found[best].ms) <= 0 else f"{found[best].ms / row.ms:.2f}"
        spread = f"{row.low:.1f} to {row.high:.1f}"
        lines.append(f"{title(name):24}{row.ms:>20.1f}{spread:>20}{sent:>18}{times:>16}")
    return "\n".join(
        [*lines, f"Times as fast: as {title(best)}, the fastest of the framework's own at 16 bits or more."]
    )


def advice(found: Mapping[str, Row], backward_ms: float = 0) -> str:
    """Whether it would pay, in a sentence or two that follow from the rows."""
    plain, levels = found[best_plain(found)], _by_level(found)
    level = RECOMMENDED if RECOMMENDED in levels else max(levels)
    row = levels[level]
    few = [low for low in levels if low < level and levels[low].surely_faster(plain)]
    fewest = min(few, key=lambda low: levels[low].ms) if few else None
    if row.surely_faster(plain):
        by = "" if backward_ms else "up to "
        where = "a step gets" if backward_ms else "a step that waits for the network gets"
        said = (
            f"At {bits(level)} the exchange adds {_ms(row.ms)} to a step, in place of {_ms(plain.ms)}: {where} "
            f"{by}{_ms(plain.gain(row))} shorter."
        )
        if needs := _needs(level):
            said += f" {bits(level)} {needs}."
        if fewest is not None and levels[fewest].ms * _MUCH < row.ms:
            said += f" {bits(fewest)} would add {_ms(levels[fewest].ms)}{_and_needs(fewest)}."
        return said + _torchs(found, row)
    said = _no_gain(bits(level), row, title(best_plain(found)), plain)
    if fewest is not None:
        said += f" {bits(fewest)} would save {_ms(plain.gain(levels[fewest]))}{_and_needs(fewest)}."
    return said


def _no_gain(words: str, row: Row, plain_title: str, plain: Row) -> str:
    """A sentence on a level that is not surely faster."""
    if row.ms >= plain.ms:
        return f"Nothing to gain at {words}: {plain_title} is as fast, or faster."
    return (
        f"No sure gain at {words}: the exchange adds {_ms(row.ms)} to a step, in place of {_ms(plain.ms)}, which is "
        f"not surely faster than {plain_title}."
    )


def _needs(level: float) -> str:
    """What a run needs at a level, as docs/levels.md has it; "" for nothing."""
    if level >= _WHOLE_MOMENTUM:
        return ""
    verb = "need" if level > 1 else "needs"
    if level >= 1:
        return f"{verb} less momentum (docs/levels.md)"
    return f"{verb} less momentum, and a learning rate that is warmed up (docs/levels.md#slow-links)"


def _and_needs(level: float) -> str:
    needs = _needs(level)
    return needs and f", and {needs}"


def size(values: int, tensors: int) -> str:
    """So many values in so many tensors, in words."""
    number = f"{values / 1e6:.1f} million" if values >= 1e5 else f"{values:,}"
    return f"{number} value{'s' if values > 1 else ''} in {tensors} tensor{'s' if tensors > 1 else ''}"


def bits(level: float) -> str:
    """A level in words."""
    return f"{level:g} bit{'s' if level > 1 else ''}"


def _ms(ms: float) -> str:
    """A time in words; what noise makes less than nothing is none."""
    return f"{max(ms, 0):.{0 if ms >= 10 else 1 if ms >= 1 else 2}f} ms"


def _by_level(found: Mapping[str, Row]) -> dict[float, Row]:
    return {level: row for name, row in found.items() if (level := level_of(name)) is not None}


def _torchs(found: Mapping[str, Row], row: Row) -> str:
    """A word on PowerSGD, where it is faster."""
    faster = [name for name in found if name.startswith("powersgd") and found[name].surely_faster(row)]
    if not faster:
        return ""
    best = min(faster, key=lambda name: found[name].ms)
    return f" {title(best)}, would add {_ms(found[best].ms)}; it loses more accuracy (docs/study.md)."


def link(found: Mapping[str, Row], latency_ms: Sequence[float]) -> str:
    """What the network gives: the rate that the float32 exchange gets, and the time of the smallest allreduce."""
    latency = f"{median(latency_ms):.2f} ms for an allreduce of one value"
    row = next(found[name] for name in (HOROVOD[0], DDP[0]) if name in found)
    if row.megabytes is None:
        return f"No network interface carries the exchange: one host, or shared memory. {latency}."
    if row.low <= 0:
        return f"The float32 exchange takes no time that can be told from noise, so it gives no rate; {latency}."
    return f"The float32 exchange sends {8 * row.megabytes / row.ms:.2f} Gbit/s from each host; {latency}."
