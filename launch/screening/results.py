"""Results on disk, one JSON line a run, and what they amount to."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable
from pathlib import Path

from common.errors import RunError
from common.markdown import markdown
from screening.contenders import shown

Key = tuple[str, str, int]  # task, contender, seed


def read(path: Path) -> dict[Key, dict]:
    """The runs that are there; none, if the file is not.

    Raises:
        RunError: a line is no run. (One without an end does not count: whoever wrote it was killed.)
    """
    if not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8").split("\n")
    found: dict[Key, dict] = {}
    for number, line in enumerate(lines[:-1], 1):
        try:
            run = json.loads(line)
            found[run["task"], run["contender"], run["seed"]] = run
        except (ValueError, TypeError, KeyError):
            raise RunError(f"{path}, line {number}: not a run") from None
    return found


def repair(path: Path) -> None:
    """Cut off half a line at the end, which a killed process has left. Not while others write."""
    if path.exists():
        raw = path.read_bytes()
        with path.open("r+b") as file:
            file.truncate(raw.rfind(b"\n") + 1)


def append(path: Path, run: dict) -> None:
    """Add a run in one piece: several processes may write."""
    with path.open("ab", buffering=0) as file:
        file.write(json.dumps(run).encode() + b"\n")


def table(runs: Iterable[dict]) -> str:
    """Markdown, a row for each task and method, in the order of the runs; differences are to uncompressed runs of
    the same seeds.
    """
    grouped: dict[tuple[str, str], dict[int, dict]] = {}
    for run in runs:
        grouped.setdefault((run["task"], run["contender"]), {})[run["seed"]] = run
    rows: list[tuple[str, ...]] = []
    for (task, contender), own in grouped.items():
        scores = [run["score"] for run in own.values()]
        base = grouped.get((task, "uncompressed"), {})
        pairs = [run["score"] - base[seed]["score"] for seed, run in own.items() if seed in base]
        mean = {key: statistics.mean(run[key] for run in own.values()) for key in ("loss", "bits", "all_bits")}
        rows.append(
            (
                task,
                shown(contender),
                str(len(own)),
                _with_error(scores),
                _with_error(pairs),
                f"{mean['loss']:.4f}",
                f"{mean['bits']:.3f}",
                f"{mean['all_bits']:.3f}",
            )
        )
    return markdown(("task", "method", "seeds", "score, %", "difference", "loss", "bits", "all"), rows)


def _with_error(numbers: list[float]) -> str:
    """Mean and standard error."""
    if not numbers:
        return ""
    error = statistics.stdev(numbers) / math.sqrt(len(numbers)) if len(numbers) > 1 else math.nan
    return f"{statistics.mean(numbers):.2f}" + ("" if math.isnan(error) else f" ± {error:.2f}")
