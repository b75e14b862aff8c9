"""The figure of error feedback: what two workers at 4 bits deliver of a small gradient, with it and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from common.drawing import COLOURS, plt
from study.workers import Workers

NAME = "error_feedback.png"
_STEPS, _SMALL, _LARGEST = 12, 0.035, 1.2  # as in docs/how_it_works.md
_SCALE = _LARGEST / 12  # of 4 bits


def draw(folder: Path) -> None:
    """Draw into an existing folder the sums of a gradient and of what arrived of it, after each step."""
    gradient = torch.full((2048,), _SMALL)
    gradient[::128] = _LARGEST
    workers = Workers(2, len(gradient))
    sent = torch.tensor([workers.mean([gradient, gradient], bits=4)[1] for _ in range(_STEPS)])
    steps = torch.arange(_STEPS + 1)
    added, arrived = _SMALL * steps, torch.cat([torch.zeros(1), sent.cumsum(0)])
    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    band: dict[str, Any] = {"color": COLOURS["grey"], "alpha": 0.2, "lw": 0, "label": "± half a scale"}
    axes.fill_between(steps, added - _SCALE / 2, added + _SCALE / 2, **band)
    axes.plot(steps, added, color=COLOURS["black"], lw=1, marker=".", label="sum of the gradients")
    look: dict[str, Any] = {"where": "post", "lw": 2.5, "marker": "o", "ms": 5}
    axes.step(steps, arrived, color=COLOURS["blue"], label="sum of what was sent, with error feedback", **look)
    axes.step(steps, 0 * steps, color=COLOURS["red"], label="without: each gradient is rounded to zero", **look)
    axes.set(xlabel="step", ylabel="sum", xlim=(-0.2, _STEPS + 0.2), xticks=range(0, _STEPS + 1, 2))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="upper left", fontsize=9)
    figure.savefig(folder / NAME, dpi=110, metadata={"Software": None})
    plt.close(figure)
