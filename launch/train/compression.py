"""What ``--compression`` stands for, behind one face: a level, and the bytes it sends."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch

from hvd_dyncomp import (
    Controller,
    CriticalRegime,
    Plateau,
    Policy,
    Schedule,
    Static,
    StepFunction,
    Traffic,
)
from hvd_dyncomp.diagnostics import relative_errors
from hvd_dyncomp.exchange.topology import Topology
from hvd_dyncomp.meter import allreduce_bytes
from hvd_dyncomp.transport import ranks
from train.traffic import Sent

if TYPE_CHECKING:
    from hvd_dyncomp.sessions.session import Session


class Baseline:
    """Horovod's own ``none`` or ``fp16``: the level never moves.

    Horovod reduces every gradient as it is, whatever its size, so the bytes follow from the number of parameters: they
    are counted as the quantizer counts what it leaves to Horovod.
    """

    def __init__(self, name: str, parameters: Iterable[torch.nn.Parameter], topology: Topology) -> None:
        self.bits = {"none": 32, "fp16": 16}[name]
        nbytes = 4 * sum(parameter.numel() for parameter in parameters)
        self._float32_per_step = allreduce_bytes(nbytes, topology.size)
        self._topology = topology
        self._steps = 0

    def sent(self) -> Sent:
        float32 = self._steps * self._float32_per_step
        # An allreduce, whatever its dtype.
        return Sent.of({(0, 32): Traffic(float32 * self.bits / 32, float32, self._steps)}, self._topology)

    def stepped(self) -> None:
        """Called after every exchange."""
        self._steps += 1

    def relative_errors(self, gradients: Mapping[str, torch.Tensor | None]) -> dict[str, float]:
        """None is known."""
        return {}

    def steps_by_level(self, epoch: int) -> dict[str, int]:
        """Nothing to report: all steps are alike."""
        return {}

    def next_level(self, metrics: dict[str, float], *, epoch: int, num_samples: int) -> tuple[float, str]:
        """Collective in ``Quantized``; here nothing is to be decided."""
        return self.bits, "constant"

    def shared_state(self) -> dict:
        return {}

    def rank_state(self) -> dict:
        return {}

    def load(self, shared: dict, own: dict) -> None:
        pass


class Quantized:
    """A quantizer and its controller; ``static`` is a controller that always says the same.

    Attributes:
        arguments: of the quantizer, which `train.frameworks` makes.
        quantizer: once it has been made.
    """

    quantizer: Session

    def __init__(self, policy: Policy, args: argparse.Namespace, topology: Topology) -> None:
        self._topology = topology
        self.controller = Controller(policy, transport=ranks.transport())
        self.arguments = {
            "error_feedback": args.error_feedback,
            "block_size": args.block_size,
            "hierarchical": None if args.hierarchical == "auto" else False,
            "warmup_steps": args.level_warmup_steps,
            "warmup_bits": args.level_warmup_bits,
        }

    @property
    def bits(self) -> float:
        """The controller's level."""
        return self.controller.bits

    def sent(self) -> Sent:
        """All that this rank has sent so far."""
        return Sent.of(self.quantizer.meter.records, self._topology, self.arguments["hierarchical"])

    def stepped(self) -> None:
        """The quantizer's meter counts for itself."""

    def relative_errors(self, gradients: Mapping[str, torch.Tensor | None]) -> dict[str, float]:
        """By tensor, how far the latest step's means are off, as this rank estimates it."""
        return relative_errors(self.quantizer, gradients)

    def steps_by_level(self, epoch: int) -> dict[str, int]:
        """How many of an epoch's steps ran at which level: of several in a warm-up only."""
        records = self.quantizer.meter.records
        return {str(bits): traffic.steps for (when, bits), traffic in sorted(records.items()) if when == epoch}

    def next_level(self, metrics: dict[str, float], *, epoch: int, num_samples: int) -> tuple[float, str]:
        """Hand an epoch's metrics to the controller; returns the next level and why. Collective."""
        bits = self.controller.step(metrics, epoch=epoch, num_samples=num_samples)
        return bits, self.controller.history[-1].reason

    def shared_state(self) -> dict:
        return self.controller.state_dict()

    def rank_state(self) -> dict:
        return self.quantizer.state_dict()

    def load(self, shared: dict, own: dict) -> None:
        self.controller.load_state_dict(shared)
        self.quantizer.load_state_dict(own)


def make_policy(args: argparse.Namespace) -> Policy:
    """The policy that the flags describe, for ``--compression static`` and ``dynamic``."""
    if args.compression == "static" or args.policy == "static":
        return Static(args.bits)
    if args.policy == "schedule":
        return Schedule(args.schedule)
    if args.policy == "plateau":
        return Plateau(
            args.levels,
            monitor=args.monitor,
            mode="max" if args.monitor == "val_accuracy" else "min",
            patience=args.patience,
            threshold=args.min_improvement,
            cooldown=args.cooldown,
        )
    if args.policy == "critical":
        low, high = args.levels
        return CriticalRegime(low, high, eta=args.eta, interval=args.interval)
    return StepFunction(
        levels=args.levels,
        thresholds=args.thresholds,
        min_improvement=args.min_improvement,
        loss_patience=args.loss_patience,
        stagnation=args.stagnation,
        stagnation_patience=args.stagnation_patience,
        uncompressed_epochs=args.uncompressed_epochs,
        cooldown=args.cooldown,
        uncompressed_at_top=args.uncompressed_at_top,
        total_epochs=args.epochs,
    )


def watches_gradients(args: argparse.Namespace) -> bool:
    """Whether the policy that the flags describe wants to know the norm of the gradients."""
    return (args.compression, args.policy) == ("dynamic", "critical")


def make_compression(args: argparse.Namespace, model: torch.nn.Module, topology: Topology) -> Baseline | Quantized:
    """What the parsed flags ask for.

    Raises:
        ValueError: the library refuses a value.
    """
    if args.compression in ("none", "fp16"):
        return Baseline(args.compression, model.parameters(), topology)
    return Quantized(make_policy(args), args, topology)
