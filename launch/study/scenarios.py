"""The study's scenarios, their runs, and where each run's results lie."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import RunError
from common.launcher import TRAINER, horovodrun, run
from train import options
from train.metrics import SUMMARY, read_lines


@dataclass(frozen=True)
class Paper:
    """What the paper reports of a scenario: test accuracy in %, minutes, TB sent (70 epochs, CIFAR-10, two GPUs)."""

    test_accuracy: float
    minutes: float
    terabytes: float


@dataclass(frozen=True)
class Scenario:
    """One row of the table. ``flags`` are those of train_resnet.py; ``climbs`` asks for thresholds as well."""

    name: str
    title: str
    flags: tuple[str, ...]
    climbs: bool = False
    paper: Paper | None = None


_WORKERS, _TIMEOUT = 2, 7200.0
_LETTER = ("--stagnation", "time")  # to the letter of the paper, which is not the default
PAPER_UNCOMPRESSED = Paper(92.96, 65.12, 2.31)

# In the order in which they run, the uncompressed one first: the thresholds of the others come from it.
SCENARIOS = (
    Scenario("none", "uncompressed", ("--compression", "none"), paper=PAPER_UNCOMPRESSED),
    Scenario("static8", "static 8", ("--compression", "static", "--bits", "8"), paper=Paper(85.97, 122.13, 1.82)),
    Scenario(
        "dynamic4-8-16",
        "dynamic 4-8-16",
        ("--levels", "4,8,16", *_LETTER),
        climbs=True,
        paper=Paper(91.40, 101.64, 2.03),
    ),
    Scenario("static4", "static 4", ("--compression", "static", "--bits", "4")),
    Scenario("dynamic1-2-4", "dynamic 1-2-4", ("--levels", "1,2,4", *_LETTER), climbs=True),
    # The paper's order turned round.
    Scenario("dynamic16-8-4", "dynamic 16-8-4", ("--levels", "16,8,4", *_LETTER), climbs=True),
)


@dataclass(frozen=True)
class Result:
    """One finished run: summary.json and the lines of metrics.jsonl."""

    scenario: Scenario
    seed: int
    summary: dict[str, Any]
    epochs: list[dict[str, Any]]


@dataclass(frozen=True)
class Study:
    """What all runs have in common; ``flags`` are train_resnet.py's."""

    runs_dir: Path
    flags: tuple[str, ...]

    def folder(self, scenario: Scenario, seed: int) -> Path:
        return self.runs_dir / f"{scenario.name}-seed{seed}"

    def arguments(self, scenario: Scenario, seed: int, thresholds: str) -> list[str]:
        """train_resnet.py's command line for one run."""
        climb = ("--thresholds", thresholds) if scenario.climbs else ()
        place = ("--output-dir", str(self.folder(scenario, seed)))
        return [*self.flags, *scenario.flags, *climb, "--seed", str(seed), *place]

    def result(self, scenario: Scenario, seed: int, thresholds: str) -> Result | None:
        """The finished run of these arguments; None where there is none yet.

        Raises:
            RunError: a run with other arguments lies in its place.
        """
        folder = self.folder(scenario, seed)
        if not (folder / SUMMARY).exists():
            return None
        summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
        wanted = options.config(options.parse(self.arguments(scenario, seed, thresholds)))
        differing = options.differences(summary["config"], {**wanted, "world_size": _WORKERS})
        if differing:
            raise RunError(f"{folder} holds a run with other arguments: {differing}; name another --runs-dir")
        return Result(scenario, seed, summary, read_lines(folder))

    def train(self, scenario: Scenario, seed: int, thresholds: str, say: Callable[[str], None]) -> Result:
        """Train one run, from its last checkpoint if it has one.

        Raises:
            RunError: it failed; the message names its log.
            subprocess.TimeoutExpired: it took longer than two hours.
        """
        folder = self.folder(scenario, seed)
        folder.mkdir(parents=True, exist_ok=True)
        arguments = [*self.arguments(scenario, seed, thresholds), "--resume"]
        log = folder / "train.log"
        say(f"{scenario.title}, seed {seed}: running, see {log}")
        with open(log, "a", encoding="utf-8") as file:
            ended = run(horovodrun(_WORKERS, [str(TRAINER), *arguments]), timeout=_TIMEOUT, output=file)
        result = self.result(scenario, seed, thresholds)
        if ended.returncode or result is None:
            raise RunError(f"{scenario.title}, seed {seed}: ended with status {ended.returncode}; see {log}")
        return result


def shared_flags(args: argparse.Namespace) -> tuple[str, ...]:
    """The flags of train_resnet.py that all runs of a study share."""
    return "--dataset", args.dataset, "--data-dir", args.data_dir, "--epochs", str(args.epochs)
