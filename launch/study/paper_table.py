"""The study's table in Markdown, our numbers beside the paper's, and the file of numbers that it is made of."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from common.docs import DATA, TABLES
from common.files import replace_text
from common.markdown import DASH, markdown
from study.scenarios import PAPER_UNCOMPRESSED, SCENARIOS, Result, Scenario

TABLE = Path(TABLES, "paper.md")
RESULTS = Path(DATA, "study", "results.json")

Number = Callable[[Result], float]


def sentence(result: Result) -> str:
    """One line about a finished run."""
    summary = result.summary
    return (
        f"{result.scenario.title}, seed {result.seed}: test accuracy {summary['test_accuracy']:.2%}, "
        f"{summary['seconds'] / 60:.1f} minutes, {summary['bytes_sent'] / 1e6:.0f} MB sent per worker "
        f"({_share(result):.1f} % of float32)"
    )


def write(docs: Path, results: list[Result], *, command: str, thresholds: str | None) -> None:
    """Write the page and the file of numbers.

    Args:
        docs: the folder that has, or will have, folders of tables and data.
        results: at least one finished run; runs of one scenario form a row.
        command: the command line to be named under the table.
        thresholds: of the dynamic scenarios; None if none took part.
    """
    numbers = {
        "command": command,
        "thresholds": thresholds,
        "runs": [
            {"scenario": result.scenario.name, "seed": result.seed, "summary": result.summary, "epochs": result.epochs}
            for result in results
        ],
    }
    for path in (docs / RESULTS, docs / TABLE):
        path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(docs / RESULTS, json.dumps(numbers, indent=1) + "\n")
    redraw(docs)


def redraw(docs: Path) -> None:
    """Write the page of the file of numbers, if there is one."""
    if (docs / RESULTS).exists():
        replace_text(docs / TABLE, page(json.loads((docs / RESULTS).read_text(encoding="utf-8"))))


def page(numbers: Mapping[str, Any]) -> str:
    """Markdown of the file of numbers."""
    scenarios = {scenario.name: scenario for scenario in SCENARIOS}
    results = [
        Result(scenarios[run["scenario"]], run["seed"], run["summary"], run["epochs"]) for run in numbers["runs"]
    ]
    return "\n\n".join(
        [
            "# The paper's scenarios",
            "Written by `python launch/study paper`. [Study](../study.md) says what follows.",
            _main_table(results),
            _caption(results, typed(numbers["command"]), numbers["thresholds"]),
            "Against the uncompressed run of the same seed, and where the time went:",
            _detail_table(results),
            "The level of every epoch of the dynamic runs (32: uncompressed):",
            _level_table(results) + "\n",
        ]
    )


def typed(command: str) -> str:
    """A command of the file, as it is typed now."""
    return command.replace("launch/study.py --paper", "launch/study paper")


def by_scenario(results: Iterable[Result]) -> dict[Scenario, list[Result]]:
    """The runs of each scenario, in the study's order; scenarios without runs are left out."""
    results = list(results)
    rows = {scenario: [result for result in results if result.scenario == scenario] for scenario in SCENARIOS}
    return {scenario: runs for scenario, runs in rows.items() if runs}


def _main_table(results: list[Result]) -> str:
    head = (
        "Scenario", "Training accuracy, %", "(paper)", "Test accuracy, %", "(paper)",
        "Minutes", "(paper)", "MB sent per worker", "TB sent (paper)", "% of float32's bytes", "(paper)",
    )  # fmt: skip
    rows: list[tuple[str, ...]] = []
    for scenario, runs in by_scenario(results).items():
        paper = scenario.paper
        rows.append(
            (
                scenario.title,
                _spread(runs, lambda run: 100 * run.summary["train_accuracy"], ".2f"),
                DASH,
                _spread(runs, lambda run: 100 * run.summary["test_accuracy"], ".2f"),
                f"{paper.test_accuracy:.2f}" if paper else DASH,
                _spread(runs, lambda run: run.summary["seconds"] / 60, ".1f"),
                f"{paper.minutes:.2f}" if paper else DASH,
                _spread(runs, lambda run: run.summary["bytes_sent"] / 1e6, ".0f"),
                f"{paper.terabytes:.2f}" if paper else DASH,
                _spread(runs, _share, ".1f"),
                f"{100 * paper.terabytes / PAPER_UNCOMPRESSED.terabytes:.0f}" if paper else DASH,
            )
        )
    return markdown(head, rows)


def _detail_table(results: list[Result]) -> str:
    head = (
        "Scenario", "Test accuracy, points against uncompressed", "% of float32's bytes", "without uncompressed epochs",
        "Uncompressed epochs", "Compute, s", "Exchange, s",
    )  # fmt: skip
    baseline = {run.seed: run.summary["test_accuracy"] for run in results if run.scenario.name == "none"}
    rows: list[tuple[str, ...]] = []
    for scenario, runs in by_scenario(results).items():
        paired = [run for run in runs if run.seed in baseline]
        rows.append(
            (
                scenario.title,
                _spread(paired, lambda run: 100 * (run.summary["test_accuracy"] - baseline[run.seed]), "+.2f"),
                _spread(runs, _share, ".1f"),
                _spread(runs, _share_without_released, ".1f"),
                ", ".join(str(run.summary["released"]["epochs"]) for run in runs),
                _spread(runs, lambda run: run.summary["seconds_compute"], ".0f"),
                _spread(runs, lambda run: run.summary["seconds_exchange"], ".1f"),
            )
        )
    return markdown(head, rows)


def _level_table(results: list[Result]) -> str:
    rows: list[tuple[str, ...]] = []
    for scenario, runs in by_scenario(results).items():
        if scenario.climbs:
            rows += [(scenario.title, str(run.seed), _levels(run)) for run in runs]
    return markdown(("Scenario", "Seed", "Bits"), rows) if rows else "No dynamic run took part."


def _levels(run: Result) -> str:
    return " ".join(f"{bits:g}" for bits in run.summary["levels"])


def _caption(results: list[Result], command: str, thresholds: str | None) -> str:
    config = results[0].summary["config"]
    seeds = sorted({run.seed for run in results})
    spread = "mean ± standard error over seeds" if len(seeds) > 1 else "seed"
    climbed = f" Thresholds of the dynamic runs: {thresholds.replace(',', ', ')}." if thresholds else ""
    return (
        f"`{command}`: {config['model']} on {config['dataset']}, {config['epochs']} epochs, {config['world_size']} "
        f"workers on one host; {spread} "
        f"{', '.join(map(str, seeds))}. Accuracies are those after the last epoch, training accuracy over the last "
        "epoch's augmented batches. Minutes are the sum of the epochs, with evaluation and whatever else the machine "
        "did meanwhile. Bytes are what was sent "
        f"per worker, scales and headers included.{climbed} The paper: 70 epochs of a ResNet on CIFAR-10 "
        "over two GPUs; its training accuracies are not known to us. Another model, data set and machine: compare the "
        "columns' pattern, not their values."
    )


def _share(run: Result) -> float:
    """Bytes sent, in % of what float32 would have sent."""
    return _percent(run.summary["bytes_sent"], run.summary["bytes_float32"])


def _share_without_released(run: Result) -> float:
    """The same over the epochs that were not released to 32 bits."""
    released = run.summary["released"]
    return _percent(*(run.summary[key] - released[key] for key in ("bytes_sent", "bytes_float32")))


def _percent(part: float, whole: float) -> float:
    return 100 * part / whole if whole else 0.0


def _spread(runs: list[Result], number: Number, form: str) -> str:
    """Mean and, from two runs on, its standard error."""
    values = [number(run) for run in runs]
    if not values:
        return DASH
    mean = format(statistics.fmean(values), form)
    if len(values) == 1:
        return mean
    return f"{mean} ± {format(statistics.stdev(values) / math.sqrt(len(values)), form.lstrip('+'))}"
