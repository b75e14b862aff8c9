"""What ``--compression`` stands for, behind one face: a Horovod compressor, a level, and the bytes it sends."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass

import horovod.torch as hvd
import torch

from hvd_dyncomp import Controller, DynamicQuantizer, Policy, Schedule, Static, StepFunction
from hvd_dyncomp.meter import allreduce_bytes


@dataclass(frozen=True)
class Sent:
    """Bytes that this rank has sent so far, and seconds it spent in ``compress`` and ``decompress``.

    ``float32`` is what the same gradients would have cost uncompressed.
    """

    compressed: float = 0.0
    uncompressed: float = 0.0
    float32: float = 0.0
    seconds: float = 0.0

    def __sub__(self, earlier: Sent) -> Sent:
        return Sent(
            self.compressed - earlier.compressed,
            self.uncompressed - earlier.uncompressed,
            self.float32 - earlier.float32,
            self.seconds - earlier.seconds,
        )

    @property
    def saved(self) -> float:
        """Fraction of float32's bytes that were not sent; 0 where nothing was to be sent."""
        return 1 - (self.compressed + self.uncompressed) / self.float32 if self.float32 else 0.0


class Baseline:
    """Horovod's own ``none`` or ``fp16``: the level never moves.

    Horovod reduces every gradient as it is, whatever its size, so the bytes follow from the number of parameters.
    """

    def __init__(self, name: str, parameters: Iterable[torch.nn.Parameter]) -> None:
        self.compressor = {"none": hvd.Compression.none, "fp16": hvd.Compression.fp16}[name]
        self.bits = {"none": 32, "fp16": 16}[name]
        values = sum(parameter.numel() for parameter in parameters)
        self._float32_per_step = allreduce_bytes(4 * values, hvd.size())
        self._steps = 0

    def sent(self) -> Sent:
        float32 = self._steps * self._float32_per_step
        bytes_sent = float32 * self.bits / 32
        return Sent(0.0, bytes_sent, float32) if self.bits == 32 else Sent(bytes_sent, 0.0, float32)

    def stepped(self) -> None:
        """Called after every exchange."""
        self._steps += 1

    def steps_by_level(self, epoch: int) -> dict[str, int]:
        """Nothing to report: all steps are alike."""
        return {}

    def next_level(self, metrics: dict[str, float], *, epoch: int, num_samples: int) -> tuple[int, str]:
        """Collective in ``Quantized``; here nothing is to be decided."""
        return self.bits, "constant"

    def shared_state(self) -> dict:
        return {}

    def rank_state(self) -> dict:
        return {}

    def load(self, shared: dict, own: dict) -> None:
        pass


class Quantized:
    """A ``DynamicQuantizer`` and its controller; ``static`` is a controller that always says the same."""

    def __init__(self, policy: Policy, args: argparse.Namespace) -> None:
        self.controller = Controller(policy)
        self.compressor = DynamicQuantizer(
            self.controller,
            error_feedback=args.error_feedback,
            rounding=args.rounding,
            block_size=args.block_size,
            seed=args.seed,
            auto_level=args.auto_level,
        )

    @property
    def bits(self) -> int:
        """The controller's level."""
        return self.controller.bits

    def sent(self) -> Sent:
        total = self.compressor.meter.total()
        return Sent(total.compressed_bytes, total.uncompressed_bytes, total.float32_bytes, total.seconds)

    def stepped(self) -> None:
        """The quantizer's meter counts for itself."""

    def steps_by_level(self, epoch: int) -> dict[str, int]:
        """How many of an epoch's steps ran at which level: more than one only with ``--auto-level``."""
        records = self.compressor.meter.records
        return {str(bits): traffic.steps for (when, bits), traffic in sorted(records.items()) if when == epoch}

    def next_level(self, metrics: dict[str, float], *, epoch: int, num_samples: int) -> tuple[int, str]:
        """Hand an epoch's metrics to the controller; returns the next level and why. Collective."""
        bits = self.controller.step(metrics, epoch=epoch, num_samples=num_samples)
        return bits, self.controller.history[-1].reason

    def shared_state(self) -> dict:
        return self.controller.state_dict()

    def rank_state(self) -> dict:
        return self.compressor.state_dict()

    def load(self, shared: dict, own: dict) -> None:
        self.controller.load_state_dict(shared)
        self.compressor.load_state_dict(own)


def make_policy(args: argparse.Namespace) -> Policy:
    """The policy that the flags describe, for ``--compression static`` and ``dynamic``."""
    if args.compression == "static" or args.policy == "static":
        return Static(args.bits)
    if args.policy == "schedule":
        return Schedule(args.schedule)
    return StepFunction(
        levels=args.levels,
        thresholds=args.thresholds,
        min_improvement=args.min_improvement,
        loss_patience=args.loss_patience,
        stagnation=args.stagnation,
        stagnation_patience=args.stagnation_patience,
        release_epochs=args.release_epochs,
        cooldown=args.cooldown,
        release_at_top=args.release_at_top,
        total_epochs=args.epochs,
    )


def make_compression(args: argparse.Namespace, model: torch.nn.Module) -> Baseline | Quantized:
    """What the parsed flags ask for.

    Raises:
        ValueError: the library refuses a value.
    """
    if args.compression in ("none", "fp16"):
        return Baseline(args.compression, model.parameters())
    return Quantized(make_policy(args), args)
