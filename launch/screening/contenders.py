"""What is compared: every way of sending gradients, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvd_dyncomp import CriticalRegime, Plateau, Policy, StepFunction
from screening.allocation import OBJECTIVES
from screening.codec import LEVELS

# (from which fraction of the training on, mean bits a value)
Schedule = tuple[tuple[float, float], ...]

METHODS = ("uncompressed", "quantized", "powersgd", "top-k", "random-k", "natural")


@dataclass(frozen=True)
class Contender:
    """One way of sending gradients.

    Attributes:
        name: unique; stands in the table.
        method: one of `METHODS`.
        budget: bits a value as training goes on. A key of `codec.LEVELS` where all tensors travel alike.
        policy: chooses the budget of each epoch, a key of `codec.LEVELS`, after the one before; `budget` is not used.
        objective: a key of `allocation.OBJECTIVES`: a level for each tensor, anew in every epoch. Empty: all alike.
        floor: no tensor below this level, where each has its own.
        small_floor: no tensor below this level that has less than a twentieth of all values.
        ends: level of the first and of the last large tensor; 0 for what the others have.
        turns: levels below one bit are not sparse codes, but blocks that take turns at this many bits.
        bound: what is owed may add so many times a block's norm at one bit and more; at b < 1 bits, bound / b.
        momentum: workers send their momentum and not their gradients (Lin et al., 2018), and keep this much of it in
            each step, where a tensor has at most `up_to` bits, and elsewhere as much as the optimizer does. Gradients
            are scaled, so that each adds up to the same. None: gradients are sent.
        up_to: see `momentum`.
        mask: where a tensor has at most `up_to` bits, a worker's momentum starts from zero where it has been sent.
        track: see `feedback.Way`.
        whiten: values are divided by how large they usually are, which workers tell each other now and then.
        follow_rate: what is owed is owed as a step of the weights: it grows as the learning rate falls.
        decay: what is owed is multiplied by this in every step.
        rank: of PowerSGD.
    """

    name: str
    method: str = "quantized"
    budget: Schedule = ((0.0, 32),)
    policy: Policy | None = None
    objective: str = ""
    floor: float = 1 / 8
    small_floor: float = 1 / 8
    ends: float = 0
    turns: int = 0
    bound: float = 2
    momentum: float | None = None
    up_to: float = 1 / 2
    mask: bool = False
    track: bool = False
    whiten: bool = False
    follow_rate: bool = False
    decay: float = 1
    rank: int = 0

    def __post_init__(self) -> None:
        if self.method not in METHODS or self.objective not in {"", *OBJECTIVES}:
            raise ValueError(f"no such method or objective: {self}")
        if self.policy is not None and self.method != "quantized":
            raise ValueError(f"only what is quantized has levels to choose: {self}")

    def bits_at(self, progress: float) -> float:
        """The budget when so much of the training is over (0 to 1)."""
        return [bits for start, bits in self.budget if start <= progress][-1]


def level_name(bits: float) -> str:
    """1/4 for 0.25."""
    return f"1/{round(1 / bits)}" if bits < 1 else f"{bits:g}"


# What is tried at levels and schedules alike.
_FLAT = {"momentum": 0.0}
_VARIANTS: dict[str, dict[str, Any]] = {
    "": {},
    "momentum": {"momentum": 0.9},
    "mask": {"momentum": 0.9, "mask": True},
    "momentum .5": {"momentum": 0.5},
    "flat": _FLAT,
    "flat to 1": {**_FLAT, "up_to": 1},
    "flat at all": {**_FLAT, "up_to": 16},
    "momentum .5 to 1": {"momentum": 0.5, "up_to": 1},
    "turns": {"turns": 1},
    "turns of 2": {"turns": 2},
    "turns momentum": {"turns": 1, "momentum": 0.9},
    "turns flat": {"turns": 1, **_FLAT},
    "wide": {"bound": 8},
    "unbounded": {"bound": 1e6},
    "flat wide": {"bound": 8, **_FLAT},
    "whiten": {"whiten": True},
    "whiten flat": {"whiten": True, **_FLAT},
    "whiten mask": {"whiten": True, "momentum": 0.9, "mask": True},
    "track": {"momentum": 0.9, "track": True},
    "follow": {"follow_rate": True},
    "decay": {"decay": 0.97},
    "ends 2": {"ends": 2},
    "ends 2 flat": {"ends": 2, **_FLAT},
    **{objective: {"objective": objective} for objective in OBJECTIVES},
    **{f"{objective} flat": {"objective": objective, **_FLAT} for objective in OBJECTIVES},
    "error, small 1": {"objective": "error", "small_floor": 1},
    "error, small 1 flat": {"objective": "error", "small_floor": 1, **_FLAT},
    "error, floor 1/4": {"objective": "error", "floor": 1 / 4},
    "error, floor 1/4 flat": {"objective": "error", "floor": 1 / 4, **_FLAT},
}


def _schedules() -> dict[str, Schedule]:
    """By name: constant ones, and what changes with the training."""
    found: dict[str, Schedule] = {level_name(bits): ((0.0, bits),) for bits in LEVELS}
    for low in (1 / 8, 1 / 4, 1 / 2):
        for high in (1, 2):
            h, name = level_name(high), level_name(low)
            found[f"{h}-{name}"] = ((0.0, high), (0.1, low))
            found[f"{name}-{h}"] = ((0.0, low), (0.8, high))
            found[f"{h}-{name}-{h}"] = ((0.0, high), (0.1, low), (0.9, high))
            found[f"{h}-{name} half"] = ((0.0, high), (0.5, low))
            found[f"{name}-{h} half"] = ((0.0, low), (0.5, high))
    found["up 1/8-1/4-1/2-1"] = ((0.0, 1 / 8), (0.25, 1 / 4), (0.5, 1 / 2), (0.75, 1))
    found["down 1-1/2-1/4-1/8"] = ((0.0, 1), (0.25, 1 / 2), (0.5, 1 / 4), (0.75, 1 / 8))
    found["up 1/8-1/4"] = ((0.0, 1 / 8), (0.5, 1 / 4))
    found["down 1/4-1/8"] = ((0.0, 1 / 4), (0.5, 1 / 8))
    return found


def _policies() -> dict[str, Policy]:
    """By name. Momentum is left out below one bit, as "flat" has it."""
    ladder = (1 / 8, 1 / 4, 1 / 2)
    # What uncompressed trainings of images, and of text, reach at about 15 and 40 % of their epochs.
    reached = {"": (0.76, 0.83), ", text": (0.27, 0.37)}
    found: dict[str, Policy] = {
        "plateau 1/8-1/2": Plateau(ladder, patience=1, threshold=0.01),
        "critical 1/8-1": CriticalRegime(1 / 8, 1, interval=1),
        "critical 1/8-2": CriticalRegime(1 / 8, 2, interval=1),
    }
    for kind, thresholds in reached.items():
        found[f"step 1/8-1/4-1/2{kind}"] = StepFunction(ladder, thresholds, stagnation=None)
        found[f"step down 1-1/4-1/8{kind}"] = StepFunction((1, 1 / 4, 1 / 8), thresholds, loss=None, stagnation=None)
    return found


def _all() -> list[Contender]:
    found = [Contender("uncompressed", "uncompressed")]
    for schedule, course in _schedules().items():
        found += [
            Contender(f"{schedule} {name}".strip(), budget=course, **variant) for name, variant in _VARIANTS.items()
        ]
    for bits in (1 / 8, 1 / 4, 1 / 2, 1):
        budget: Schedule = ((0.0, bits),)
        found += [Contender(f"{how} {level_name(bits)}", how, budget=budget) for how in ("top-k", "random-k")]
        found.append(Contender(f"top-k {level_name(bits)} flat", "top-k", budget=budget, momentum=0.0))
    for rank in (1, 2, 4):
        found.append(Contender(f"PowerSGD rank {rank}", "powersgd", rank=rank))
        found.append(Contender(f"PowerSGD rank {rank} flat", "powersgd", rank=rank, momentum=0.0))
    found.append(Contender("uncompressed flat", "uncompressed", momentum=0.0))
    found.append(Contender("natural", "natural"))
    found += [Contender(name, policy=policy, momentum=0.0) for name, policy in _policies().items()]
    return found


CONTENDERS = {contender.name: contender for contender in _all()}
