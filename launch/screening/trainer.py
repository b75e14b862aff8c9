"""One training: a task, a contender, a seed."""

from __future__ import annotations

import time

import torch
from torch import nn

from screening.aggregation import SMALL, Traffic
from screening.comparators import aggregator
from screening.contenders import Contender
from screening.steering import Steering
from screening.tasks import Task, Work


def optimizer(task: Task, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The task's own, at its peak rate."""
    if task.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=task.rate, betas=(task.momentum, 0.999), weight_decay=task.weight_decay)
    return torch.optim.SGD(parameters, lr=task.rate, momentum=task.momentum, weight_decay=task.weight_decay)


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
    stepper, steering = optimizer(task, parameters), Steering(contender.policy, work, model)
    steps = task.epochs * work.steps
    rates = torch.optim.lr_scheduler.OneCycleLR(stepper, task.rate, total_steps=steps + 1, cycle_momentum=False)
    curve, step, rate = [], 0, rates.get_last_lr()[0]
    for epoch in range(task.epochs):
        exchange.new_epoch(steering.bits)
        losses = []
        for batches in work.epoch(seed, epoch):
            before, rate = rate, rates.get_last_lr()[0]
            exchange.new_step(step / steps, float(before) / float(rate))
            gradients = []
            for inputs, targets in batches:
                loss = work.loss(model(inputs), targets)
                gradients.append(list(torch.autograd.grad(loss, parameters)))
                losses.append(float(loss.detach()))
            for parameter, *own in zip(parameters, *gradients, strict=True):
                if parameter.numel() < SMALL:
                    parameter.grad = torch.stack(own).mean(0)
            means = exchange.mean([[own[i].reshape(-1) for i in large] for own in gradients])
            for i, mean in zip(large, means, strict=True):
                parameters[i].grad = mean.view(parameters[i].shape)
            steering.stepped()
            stepper.step()
            rates.step()
            step += 1
        last = epoch + 1 == task.epochs
        score, loss_then = work.score(model, last)
        train_loss = sum(losses) / len(losses)
        steered = steering.after(epoch, train_loss)
        entry = {"train": train_loss, "score": score, "loss": loss_then, "bits": exchange.traffic.bits}
        curve.append({**{key: round(value, 4) for key, value in entry.items()}, **exchange.notes(), **steered})
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
