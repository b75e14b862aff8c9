"""The study's figures: accuracies, loss and bytes by epoch, with the level of dynamic runs as shaded steps behind."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # files only: no display is there, or needed

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from studies.paper_table import by_scenario, whose_bytes
from studies.scenarios import Result, Scenario
from training.carried import Carried

FIGURES = ("figure1_training_accuracy.png", "figure2_test_accuracy.png", "figure3_loss_and_bytes.png")

# Okabe and Ito's colours, which colour-blind readers tell apart; line styles repeat the distinction.
_STYLES = {
    "none": ("#000000", "-"),
    "static8": ("#E69F00", "--"),
    "dynamic4-8-16": ("#0072B2", "-"),
    "static4": ("#CC79A7", "--"),
    "dynamic1-2-4": ("#009E73", "-"),
}
_LEVELS = (0.125, 0.25, 0.5, 1, 2, 4, 8, 16, 32)

Curve = Callable[[Result], list[float]]


def write(output_dir: Path, results: list[Result]) -> None:
    """Draw the three figures into ``output_dir``, an existing folder, as PNG files; needs at least one result."""
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    _draw(axes, results, _percentages("train_accuracy"), "training accuracy, %")
    _finish(figure, axes, output_dir / FIGURES[0])

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    _draw(axes, results, _percentages("test_accuracy"), "test accuracy, %")
    _finish(figure, axes, output_dir / FIGURES[1])

    figure, (loss, sent) = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    _draw(loss, results, lambda run: [_number(line["train_loss"]) for line in run.epochs], "training loss, nats")
    _draw(sent, results, _megabytes_so_far, f"MB sent {whose_bytes(results)}, cumulative")
    _finish(figure, loss, output_dir / FIGURES[2])


def _draw(axes: Axes, results: list[Result], curve: Curve, label: str) -> None:
    """One curve per scenario: the mean over seeds, with a band from the lowest seed to the highest."""
    _shade_levels(axes, results)
    for scenario, runs in by_scenario(results).items():
        colour, line = _STYLES[scenario.name]
        columns = list(zip(*(curve(run) for run in runs), strict=True))
        epochs = range(1, len(columns) + 1)
        axes.plot(epochs, [statistics.fmean(c) for c in columns], line, color=colour, label=scenario.title, marker=".")
        if len(runs) > 1:
            axes.fill_between(epochs, list(map(min, columns)), list(map(max, columns)), color=colour, alpha=0.12, lw=0)
    axes.set(xlabel="epoch", ylabel=label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)


def _shade_levels(axes: Axes, results: list[Result]) -> None:
    """Behind the curves of dynamic runs: the bits in force in each epoch, on a logarithmic axis to the right."""
    climbing = {scenario: runs for scenario, runs in by_scenario(results).items() if scenario.climbs}
    if not climbing:
        return
    levels = axes.twinx()
    levels.set_yscale("log", base=2)
    # The lower edge lies below the lowest level in use, so that it is seen; the upper part is left to the curves.
    lowest = 0.7 * min(bits for runs in climbing.values() for run in runs for bits in run.summary["levels"])
    levels.set_ylim(lowest, 64)
    shown = [bits for bits in _LEVELS if bits > lowest]
    levels.yaxis.set_major_locator(FixedLocator(shown))
    levels.yaxis.set_minor_locator(NullLocator())
    levels.set_yticks(shown, [str(bits) for bits in shown])
    levels.set_ylabel("bits per value (shaded steps)")
    for scenario, runs in climbing.items():
        for run in runs:
            _steps(levels, scenario, run.summary["levels"], lowest, alpha=0.16 / len(runs))
    # A twin lies above its parent unless told otherwise, and then shades the curves instead of backing them.
    axes.set_zorder(levels.get_zorder() + 1)
    axes.patch.set_visible(False)


def _steps(levels: Axes, scenario: Scenario, bits: list[float], lowest: float, *, alpha: float) -> None:
    # Epoch e is a bar from e - 1/2 to e + 1/2, under the point that its metrics are drawn at.
    edges = [epoch + 0.5 for epoch in range(len(bits) + 1)]
    levels.stairs(bits, edges, baseline=lowest, fill=True, color=_STYLES[scenario.name][0], alpha=alpha, lw=0)


def _finish(figure: Figure, axes: Axes, path: Path) -> None:
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _percentages(key: str) -> Curve:
    return lambda run: [100 * _number(line[key]) for line in run.epochs]


def _megabytes_so_far(run: Result) -> list[float]:
    total, curve = 0.0, []
    for line in run.epochs:
        total += Carried.of(line).sent / 1e6
        curve.append(total)
    return curve


def _number(value: float | None) -> float:
    """JSON's null stands for a number that was not finite."""
    return float("nan") if value is None else value
