"""Learning rates, scores, metrics files: what needs no other rank."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from common.errors import RunError
from train.engine import LearningRate, Score, train_epoch
from train.gradients import GradientNorm
from train.metrics import _NEEDED, Metrics, read_lines


class OneBatch:
    """Of two images."""

    def __len__(self) -> int:
        return 1

    def epoch(self, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        yield torch.eye(4)[:2].view(2, 1, 2, 2), torch.tensor([0, 1])


def test_warm_up_goes_from_one_worker_to_all() -> None:
    rate = LearningRate(0.05, 4, steps_per_epoch=10, epochs=4, warmup_epochs=1, shape="cosine")
    rates = [rate.at(step) for step in range(40)]
    assert rates[0] == 0.05
    assert rates[10] == pytest.approx(0.2)
    assert rates[:11] == sorted(rates[:11])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0 < rates[-1] < 0.001


def test_steps_are_tenths() -> None:
    rate = LearningRate(0.1, 1, steps_per_epoch=1, epochs=8, warmup_epochs=0, shape="step")
    assert [rate.at(step) for step in range(8)] == pytest.approx([0.1] * 4 + [0.01] * 2 + [0.001] * 2)


def test_scores_are_weighted_by_samples() -> None:
    score = Score()
    score.add(torch.eye(3), torch.tensor([0, 1, 1]), 0.5)
    score.add(torch.eye(3)[:1], torch.tensor([0]), 1.5)
    assert score.accuracy == pytest.approx(3 / 4)
    assert score.mean_loss == pytest.approx((3 * 0.5 + 1.5) / 4)
    assert Score().accuracy == 0


def test_the_norm_of_gradients_is_that_of_their_mean() -> None:
    used, unused = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(3))
    norm = GradientNorm([used, unused])
    for gradient in ([1.0, 4.0], [5.0, 4.0]):
        used.grad = torch.tensor(gradient)
        norm.add()
    used.grad.zero_()  # what was added is a copy
    assert norm.take() == pytest.approx(5.0)
    # The next epoch begins anew; both parameters count.
    used.grad, unused.grad = torch.tensor([0.0, 3.0]), torch.tensor([4.0, 0.0, 0.0])
    norm.add()
    assert norm.take() == pytest.approx(5.0)
    assert norm.take() == 0


def test_clipping_is_after_the_exchange_and_after_norms_and_errors_are_taken() -> None:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3, bias=False))
    [weight] = model.parameters()
    before = weight.detach().clone()
    exchanged: list[float] = []
    framework = SimpleNamespace(
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        forward=model,
        synchronize=lambda: exchanged.append(float(weight.grad.mul_(100).norm())),
        synchronized=nullcontext,
    )
    compression = SimpleNamespace(
        sent=lambda: SimpleNamespace(seconds=0.0),
        stepped=lambda: None,
        relative_errors=lambda gradients: {"weight": float(next(iter(gradients.values())).norm())},
    )
    batches: Any = OneBatch()
    rate, watched = SimpleNamespace(at=lambda step: 1.0), GradientNorm([weight])
    *_, errors = train_epoch(model, framework, compression, rate, batches, 0, lambda _: None, watched, clip_norm=0.01)  # type: ignore[arg-type]
    assert watched.take() == pytest.approx(exchanged[0]) and exchanged[0] > 1
    assert errors == {"weight": exchanged[0]}
    assert float((weight.detach() - before).norm()) == pytest.approx(0.01, rel=1e-3)


def test_metrics_of_epochs_without_a_checkpoint_are_dropped(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path)
    lines = [dict.fromkeys(_NEEDED, 1.0) | {"epoch": epoch} for epoch in range(3)]
    for line in lines:
        metrics.add({**line, "train_loss": float("nan") if line["epoch"] == 1 else 1.0})
    with open(metrics.path, "a") as file:
        file.write('{"epoch": 3, "tr')
    again = Metrics(tmp_path)
    again.keep(2)
    assert read_lines(metrics.path) == [lines[0], {**lines[1], "train_loss": None}]
    with pytest.raises(RunError, match="2 of the 3"):
        again.keep(3)
