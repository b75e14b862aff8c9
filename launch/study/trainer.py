"""One training: a task, a method, a seed."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from study.aggregation import SMALL, Aggregator, Small
from study.comparators import aggregator
from study.methods import Method
from study.steering import Steering
from study.tasks import Task, Work


def optimizer(task: Task, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The task's own, at its peak rate. Its first group are the large parameters."""
    divided = [p for p in parameters if p.numel() >= SMALL], [p for p in parameters if p.numel() < SMALL]
    groups = [{"params": own} for own in divided if own]
    if task.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=task.rate, betas=(task.momentum, 0.999), weight_decay=task.weight_decay)
    return torch.optim.SGD(groups, lr=task.rate, momentum=task.momentum, weight_decay=task.weight_decay)


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


def step_frozen(stepper: torch.optim.Optimizer) -> None:
    """One step of AdamW in which the gradients of large parameters are its momentum, and their variances stay as they
    are (1-bit Adam). Small parameters step as ever. A value whose gradient has always been zero stays, too: no code of
    1 bit is zero, and what arrives would be divided by nothing. (DeepSpeed has a mask for such values.)
    """
    large = stepper.param_groups[0]
    with torch.no_grad():
        for parameter in large["params"]:
            state = stepper.state[parameter]
            unbiased = state["exp_avg_sq"] / (1 - large["betas"][1] ** float(state["step"]))
            parameter.mul_(1 - large["lr"] * large["weight_decay"])
            momentum = torch.where(unbiased > 0, parameter.grad, 0)
            parameter.addcdiv_(momentum, unbiased.sqrt() + large["eps"], value=-large["lr"])
            parameter.grad = None  # so that the optimizer leaves it alone
    stepper.step()


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

    def new_epoch(self, level: float | None) -> None:
        """Called before each epoch, with the level that a policy has chosen for it, if there is one."""
        if level is not None:
            self.method = self.exchange.method = self.method.at(level)

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
        values and of steps, seconds, a curve.
    """
    began = time.perf_counter()
    model = work.model(seed)
    parameters = list(model.parameters())
    average = Averaging(method, parameters, task.workers, seed)
    exchange, stepper, steering = average.exchange, optimizer(task, parameters), Steering(method.policy, work, model)
    steps = task.epochs * work.steps
    rates = torch.optim.lr_scheduler.OneCycleLR(
        stepper, task.rate, total_steps=steps + 1, pct_start=task.warm_up, cycle_momentum=False
    )
    curve, step = [], 0
    for epoch in range(task.epochs):
        average.new_epoch(steering.bits)
        losses = []
        for batches in work.epoch(seed, epoch):
            average.new_step(step / steps)
            gradients = []
            for inputs, targets in batches:
                loss = work.loss(model(inputs), targets)
                gradients.append(list(torch.autograd.grad(loss, parameters)))
                losses.append(float(loss.detach()))
            average(gradients)
            if task.clip:
                nn.utils.clip_grad_norm_(parameters, task.clip)
            steering.stepped()
            if not average.method.keeps_momentum_at(step / steps):
                leave_momentum_out(stepper, task, average.method.momentum, average.method.factor)
            if method.kind == "1-bit adam" and exchange.bits != 32:
                step_frozen(stepper)
            else:
                stepper.step()
            put_momentum_back(stepper, task)
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
        "all_bits": round((exchange.traffic + average.small.traffic).bits, 4),
        "values": sum(parameter.numel() for parameter in parameters),
        "steps": step,
        "seconds": round(time.perf_counter() - began, 1),
        "curve": curve,
    }
