"""The benchmarks' JSON files: what was measured, where and with what; medians and quartiles of it."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from common.docs import DATA, DOCS
from common.files import replace_text
from common.launcher import TORCHRUN
from hvd_dyncomp.exchange.wire import WIRE_VERSION
from netlab.hosts import WITH_HOROVOD

FOLDER = DOCS / DATA / "bench"
SHARED_MEMORY = "shm"  # in place of a link's rate: all workers are on one host
# Of the versions in a file, those that are shown.
_NAMES = {"hvd_dyncomp": "hvd_dyncomp", "wire": "wire version", "torch": "torch", "horovod": "Horovod"}


@dataclass(frozen=True)
class Summary:
    """Of one method at one rate: milliseconds a step, and bits per gradient value that a host's interface sent (None
    where nothing was counted)."""

    median: float
    low: float
    high: float
    steps: int
    bits: float | None

    def middle(self) -> str:
        """The median alone."""
        return f"{self.median:{_form(self.median)}}"

    def __str__(self) -> str:
        return f"{self.middle()} ({self.low:{_form(self.low)}}–{self.high:{_form(self.high)}})"


def _form(number: float) -> str:
    return ".0f" if number >= 100 else ".1f"


def summarize(measured: Mapping[str, Any], values: int, batches: int = 1) -> Summary:
    """Median and quartiles of a method's steps, or of their batches; bits are those of a step.

    Args:
        measured: "ms" and "sent" as `hvd_dyncomp.commands.probe.turns.measure` returns them.
        values: of the model.
        batches: of a step.
    """
    times = [ms / batches for ms in measured["ms"]]
    low, median, high = quartiles(times)
    # The mean over hosts: Open MPI's reductions for an odd number of them load one more than the others.
    sent = [8 * statistics.fmean(step) / values for step in measured["sent"]]
    return Summary(median, low, high, len(times), statistics.median(sent) if sent else None)


def quartiles(numbers: list[float]) -> tuple[float, float, float]:
    """The lower quartile, the median and the upper one; of a single number, itself."""
    if len(numbers) == 1:
        return numbers[0], numbers[0], numbers[0]
    low, median, high = statistics.quantiles(numbers, n=4, method="inclusive")
    return low, median, high


def about(command: str, seed: int, environment: Mapping[str, str], by: str = "") -> dict[str, Any]:
    """What a reader needs to judge the figures by, or to get them again.

    Args:
        command, seed: of the benchmark.
        environment: of its workers.
        by: their launcher; "" if there are none.
    """
    horovod = ("horovod",) if by in WITH_HOROVOD else ()
    return {
        "command": command,
        "commit": commit(),
        "date": today(),
        "seed": seed,
        "environment": dict(environment),
        # What else was running, looked at while nothing of ours was: with more than a little of it, trust no figure.
        "busy_before_percent": psutil.cpu_percent(interval=1.0),
        "machine": {"processor": _processor(), "cores": os.cpu_count(), "kernel": platform.release()},
        "versions": {
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in ("torch", *horovod, "hvd_dyncomp")},
            "wire": WIRE_VERSION,
            **({"mpi": _first_line(["mpirun", "--version"])} if horovod else {}),
        },
        **({"launcher": by} if by else {}),
    }


def today() -> str:
    """The date, as files have it; older ones have none."""
    return datetime.now(UTC).date().isoformat()


def is_current(results: Mapping[str, Any]) -> bool:
    """Whether all that a file holds was measured with the code's wire version; an empty one holds nothing."""
    found = list(_notes(results))
    return bool(found) and all(note.get("versions", {}).get("wire") == WIRE_VERSION for note in found)


def _notes(results: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """What `about` has put into a file: one for all, or one for each rate (none yet where it was cut off)."""
    if "rates" in results:
        for found in results["rates"].values():
            yield found.get("about", {})
    elif results:
        yield results.get("about", {})


def origin(notes: Iterable[Mapping[str, Any]]) -> str:
    """When and where it was measured, and with which versions, in a sentence that begins with a space; "" where nobody
    said.
    """
    said: dict[str, None] = {}
    for note in notes:
        date = f" on {note['date']}" if "date" in note else ""
        machine = note.get("machine")
        if isinstance(machine, Mapping):
            date += f" on {machine['cores']} cores of {machine['processor']}"
        named = [
            f"{shown} {note['versions'][name]}" for name, shown in _NAMES.items() if name in note.get("versions", {})
        ]
        said[date + (f" with {', '.join(named)}" if named else "")] = None
    return "".join(f" Measured{words}." for words in said if words)


def typed(command: str) -> str:
    """A command of a file, as it is typed now."""
    return command.replace("--contenders", "--methods").replace("launch/bench.py --part ", "launch/bench ")


def commit() -> str:
    """The commit that is checked out, and whether the package has been changed since."""
    head = _first_line(["git", "rev-parse", "--short", "HEAD"])
    changed = _first_line(["git", "status", "--porcelain", "--untracked-files=no", "--", "hvd_dyncomp"])
    return f"{head} and changes" if changed else head


def _first_line(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    except FileNotFoundError:
        return ""
    return done.stdout.partition("\n")[0].strip()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def suffix(device: str, launcher: str = "mpirun") -> str:
    """What the names of files end with: figures of Horovod with and without MPI, of GPUs and CPUs are kept apart."""
    return (f"-{launcher}" if launcher in ("gloo", TORCHRUN) else "") + ("-cuda" if device == "cuda" else "")


def load(path: Path) -> dict[str, Any]:
    """A file's contents; {} where there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def save(path: Path, results: Mapping[str, Any]) -> None:
    """Replace a file in one go: an interrupted benchmark leaves the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps(results, indent=1) + "\n")
