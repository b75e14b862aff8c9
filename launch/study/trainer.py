"""One training: a task, a method, a seed."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from study.aggregation import SMALL, Aggregator, Small
from study.comparators import aggregator
from study.methods import Method
from study.tasks import Task, Work


def optimizer(task: Task, parameters: list[nn.Parameter], *, nesterov: bool = False) -> torch.optim.Optimizer:
    """The task's own, at its peak rate, or with Nesterov's momentum. Its first group are the large parameters."""
    divided = [p for p in parameters if p.numel() >= SMALL], [p for p in parameters if p.numel() < SMALL]
    groups = [{"params": own} for own in divided if own]
    told: dict[str, Any] = {"lr": task.rate, "weight_decay": task.weight_decay}
    if task.optimizer == "adamw":
        betas = (task.momentum, 0.999)
        if nesterov:
            return torch.optim.NAdam(groups, betas=betas, decoupled_weight_decay=True, **told)
        return torch.optim.AdamW(groups, betas=betas, **told)
    return torch.optim.SGD(groups, momentum=task.momentum, nesterov=nesterov, **told)


def leave_momentum_out(stepper: torch.optim.Optimizer, task: Task, left: float = 0.0, factor: float = 1.0) -> None:
    """For the next step, whose rates have been set: of AdamW the first beta is 0, or what is left of it; SGD that has
    momentum m steps by (1 - left) / (1 - m) of its rate, sooner what adds up to the same, and with nothing left it
    gives up what it has of momentum. Both times `factor`. Small parameters keep theirs.
    """
    large = stepper.param_groups[0]
    large["lr"] *= factor
    if task.optimizer == "adamw":
        large["betas"] = (left, large["betas"][1])
        return
    large["momentum"] = left
    large["lr"] *= (1 - left) / (1 - task.momentum)
    if not left:
        for parameter in large["params"]:
            stepper.state[parameter].pop("momentum_buffer", None)


def put_momentum_back(stepper: torch.optim.Optimizer, task: Task) -> None:
    """After a step, before the rates of the next are set."""
    large = stepper.param_groups[0]
    if task.optimizer == "adamw":
        large["betas"] = (task.momentum, large["betas"][1])
    else:
        large["momentum"] = task.momentum


class Averaging:
    """Gradients of all workers in, means in `grad` out.

    Args:
        method: how they travel.
        parameters: of the model.
        workers: how many there are.
        seed: of whatever is random.
    """

    def __init__(self, method: Method, parameters: list[nn.Parameter], workers: int, seed: int) -> None:
        self.method, self.parameters = method, parameters
        self.large = [i for i, parameter in enumerate(parameters) if parameter.numel() >= SMALL]
        self.rest = [i for i, parameter in enumerate(parameters) if parameter.numel() < SMALL]
        self.exchange: Aggregator = aggregator(method, [parameters[i].shape for i in self.large], workers, seed)
        self.small = Small(method, [parameters[i].numel() for i in self.rest], workers)

    def new_step(self, progress: float) -> None:
        """Called before each step: what part of the training is over."""
        self.exchange.new_step(progress)
        self.small_bits = self.method.small_bits_at(progress)

    def __call__(self, gradients: list[list[Tensor]]) -> None:
        """Average what each worker has, one tensor a parameter."""
        flat = [[gradient.reshape(-1) for gradient in own] for own in gradients]
        means = self.exchange.mean([[own[i] for i in self.large] for own in flat])
        means += self.small.mean([[own[i] for i in self.rest] for own in flat], self.small_bits)
        for i, mean in zip([*self.large, *self.rest], means, strict=True):
            self.parameters[i].grad = mean.view(self.parameters[i].shape)


def train(task: Task, work: Work, method: Method, seed: int) -> dict:
    """Train once.

    Returns:
        What is written down: the score in %, the loss, bits a value of the large tensors and of all, the number of all
        values and of steps, seconds, and the score after each epoch.
    """
    began = time.perf_counter()
    model = work.model(seed)
    parameters = list(model.parameters())
    average = Averaging(method, parameters, task.workers, seed)
    exchange, stepper = average.exchange, optimizer(task, parameters, nesterov=method.nesterov)
    steps = task.epochs * work.steps
    rates = torch.optim.lr_scheduler.OneCycleLR(
        stepper, task.rate, total_steps=steps + 1, pct_start=task.warm_up, cycle_momentum=False
    )
    curve, step = [], 0
    for epoch in range(task.epochs):
        for batches in work.epoch(seed, epoch):
            average.new_step(step / steps)
            gradients = []
            for inputs, targets in batches:
                loss = work.loss(model(inputs), targets)
                gradients.append(list(torch.autograd.grad(loss, parameters)))
            average(gradients)
            if task.clip:
                nn.utils.clip_grad_norm_(parameters, task.clip)
            if (left := method.momentum_at(step / steps)) is not None:
                leave_momentum_out(stepper, task, left, method.factor)
            stepper.step()
            put_momentum_back(stepper, task)
            rates.step()
            step += 1
        score, loss_then = work.score(model, epoch + 1 == task.epochs)
        curve.append(round(score, 4))
    return {
        "score": round(score, 3),
        "loss": round(loss_then, 5),
        "bits": round(exchange.traffic.bits, 4),
        "all_bits": round((exchange.traffic + average.small.traffic).bits, 4),
        "values": sum(parameter.numel() for parameter in parameters),
        "steps": step,
        "seconds": round(time.perf_counter() - began, 1),
        "curve": curve,
    }
