"""One training: a task, a contender, a seed."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from screening.aggregation import SMALL, Quantized, Traffic
from screening.comparators import aggregator
from screening.contenders import Contender
from screening.tasks import Task, Work

MOMENTUM = 0.9


class Momentum:
    """What workers send in place of gradients: each its own momentum (Lin et al., 2018).

    Args:
        weight_decay: is added to gradients.
        share: of a new gradient in the momentum.
    """

    def __init__(self, parameters: list[Tensor], workers: int, *, weight_decay: float, share: float) -> None:
        self.parameters, self.weight_decay, self.share = parameters, weight_decay, share
        self.own = [[torch.zeros_like(p) for p in parameters] for _ in range(workers)]

    @torch.no_grad()
    def of(self, gradients: list[list[Tensor]]) -> list[list[Tensor]]:
        """Each worker's momentum with its new gradients."""
        for own, new in zip(self.own, gradients, strict=True):
            for velocity, gradient, parameter in zip(own, new, self.parameters, strict=True):
                velocity.mul_(MOMENTUM).add_(gradient, alpha=self.share).add_(parameter, alpha=self.weight_decay)
        return self.own

    def forget(self, large: list[int], delivered: list[list[Tensor]]) -> None:
        """Start from zero where something has been sent."""
        for own, sent in zip(self.own, delivered, strict=True):
            for i, values in zip(large, sent, strict=True):
                own[i][values.view_as(own[i]) != 0] = 0


def sent_momentum(task: Task, parameters: list[Tensor]) -> Momentum:
    """As the task's optimizer would have it. AdamW's is a mean, and its weight decay no gradient."""
    if task.optimizer == "adamw":
        return Momentum(parameters, task.workers, weight_decay=0.0, share=1 - MOMENTUM)
    return Momentum(parameters, task.workers, weight_decay=task.weight_decay, share=1.0)


def optimizer(task: Task, parameters: list[nn.Parameter], *, plain: bool) -> torch.optim.Optimizer:
    """`plain`: momentum, and SGD's weight decay, are in the gradients already."""
    if task.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=task.rate, weight_decay=task.weight_decay)
    momentum, decay = (0.0, 0.0) if plain else (MOMENTUM, task.weight_decay)
    return torch.optim.SGD(parameters, lr=task.rate, momentum=momentum, weight_decay=decay)


def train(task: Task, work: Work, contender: Contender, seed: int) -> dict:
    """Train once.

    Returns:
        What is written down: the score in %, the loss, bits a value of the large tensors and of all, a curve.
    """
    began = time.perf_counter()
    model = work.model(seed)
    parameters = list(model.parameters())
    large = [i for i, parameter in enumerate(parameters) if parameter.numel() >= SMALL]
    small = sum(parameter.numel() for parameter in parameters if parameter.numel() < SMALL)
    exchange = aggregator(contender, [parameters[i].shape for i in large], task.workers, seed)
    stepper = optimizer(task, parameters, plain=contender.momentum)
    momentum = sent_momentum(task, list(parameters)) if contender.momentum else None
    steps = task.epochs * work.steps
    rates = torch.optim.lr_scheduler.OneCycleLR(stepper, task.rate, total_steps=steps + 1, cycle_momentum=False)
    curve, step, rate = [], 0, rates.get_last_lr()[0]
    for epoch in range(task.epochs):
        exchange.new_epoch()
        losses = []
        for batches in work.epoch(seed, epoch):
            before, rate = rate, rates.get_last_lr()[0]
            exchange.new_step(step / steps, float(before) / float(rate))
            gradients = []
            for inputs, targets in batches:
                loss = work.loss(model(inputs), targets)
                gradients.append(list(torch.autograd.grad(loss, parameters)))
                losses.append(float(loss.detach()))
            if momentum:
                gradients = momentum.of(gradients)
            for parameter, *own in zip(parameters, *gradients, strict=True):
                if parameter.numel() < SMALL:
                    parameter.grad = torch.stack(own).mean(0)
            means = exchange.mean([[own[i].reshape(-1) for i in large] for own in gradients])
            for i, mean in zip(large, means, strict=True):
                parameters[i].grad = mean.view(parameters[i].shape)
            if momentum and contender.mask and isinstance(exchange, Quantized):
                momentum.forget(large, exchange.delivered)
            stepper.step()
            rates.step()
            step += 1
        last = epoch + 1 == task.epochs
        score, loss_then = work.score(model, last)
        entry = {"train": sum(losses) / len(losses), "score": score, "loss": loss_then, "bits": exchange.traffic.bits}
        curve.append({**{key: round(value, 4) for key, value in entry.items()}, **exchange.notes()})
    return {
        "score": round(score, 3),
        "loss": round(loss_then, 5),
        "bits": round(exchange.traffic.bits, 4),
        "all_bits": round(_with_small(exchange.traffic, small * step), 4),
        "seconds": round(time.perf_counter() - began, 1),
        "curve": curve,
    }


def _with_small(traffic: Traffic, small: int) -> float:
    """Bits a value, where so many others have travelled as float32."""
    return (8 * traffic.bytes + 32 * small) / (traffic.values + small)
