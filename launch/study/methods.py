"""What is compared: every way of sending gradients, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, replace

# (from which fraction of the training on, mean bits a value)
Schedule = tuple[tuple[float, float], ...]

# Momentum is left out at so many bits and less, if nothing else is said; the library's `less_momentum` leaves some of
# Adam's at 1 and 2 bits ("2, finer, momentum 0.7"), where it gives SGD Nesterov's. And what the library does by
# itself: tensors of fewer values than `aggregation.SMALL` travel at 8 bits where the level is less.
NO_MOMENTUM_UP_TO = 2
BITS_OF_SMALL = 8

RISE = 0.3  # the part of a task's steps in which its rate rises, if nothing else is said

QUANTIZED = ("quantized", "scale per tensor")


@dataclass(frozen=True)
class Method:
    """One way of sending gradients. Without further words it is what the library does, but for momentum (see above).

    Attributes:
        name: unique; stands in the tables.
        kind: a key of `comparators.BY_KIND`.
        budget: bits a value as training goes on. A key of `codec.LEVELS` where it is quantized. At 32 every
            method sends float32. (PowerSGD has ranks for bits: its budget says when, and not how many.)
        small_bits: of small tensors: 32, 16 (rounded to float16) or 8; 0: as the library has it.
        no_momentum_up_to: the optimizer's momentum of large tensors is left out at so many bits and less. 0: never.
        momentum: so much is left of it there. With one level only: what the optimizer has gathered stays as it is.
        factor: c of the rate there, c (1 - left) / (1 - m) of the task's: 1 is as much progress a step as with it.
        rank: of PowerSGD.
        nesterov: momentum is Nesterov's, of AdamW as `torch.optim.NAdam` has it.
    """

    name: str
    kind: str = "quantized"
    budget: Schedule = ((0.0, 32),)
    small_bits: int = 0
    no_momentum_up_to: float = NO_MOMENTUM_UP_TO
    momentum: float = 0.0
    factor: float = 1.0
    rank: int = 0
    nesterov: bool = False

    def bits_at(self, progress: float) -> float:
        """The budget when so much of the training is over (0 to 1)."""
        return [bits for start, bits in self.budget if start <= progress][-1]

    def small_bits_at(self, progress: float) -> int:
        """Of small tensors, when so much of the training is over."""
        bits = int(max(self.bits_at(progress), BITS_OF_SMALL))
        if bits == 32:
            return bits
        return self.small_bits or (bits if self.kind in QUANTIZED else 32)

    def keeps_momentum_at(self, progress: float) -> bool:
        """Whether the optimizer's momentum is kept, when so much of the training is over."""
        return self.bits_at(progress) > self.no_momentum_up_to


def shown(name: str) -> str:
    """How a method is called in tables and figures. The record, and so the code, has older names."""
    for bits in (8, 4, 2):
        name = name.replace(f"1/{bits}", f"{1 / bits:g}")
    return (
        name.replace("ladder ", "schedule ")
        .replace(", c = ", ", step size x ")
        .replace(" error", ", a level per tensor")
    )


def level(bits: float) -> str:
    """1/4 for 0.25."""
    return f"1/{round(1 / bits)}" if bits < 1 else f"{bits:g}"


def _one(bits: float) -> Method:
    return Method(level(bits), budget=((0.0, bits),))


def _ladder(*steps: tuple[float, float]) -> Method:
    return Method(f"ladder {'-'.join(level(bits) for _, bits in steps)}", budget=steps)


ONE_LEVEL = tuple(_one(bits) for bits in (8, 5, 4, 3, 2, 1, 1 / 2, 1 / 4, 1 / 8))

# The paper's climb as accuracies are reached; here when 15 and 40 % of the training are over, which is about where
# `study.scenarios` has its thresholds. The others spend a quarter of the training at each level.
PAPER_LADDERS = (
    _ladder((0.0, 4), (0.15, 8), (0.4, 16)),
    _ladder((0.0, 1), (0.15, 2), (0.4, 4)),
)
UP = _ladder((0.0, 1 / 8), (0.25, 1 / 4), (0.5, 1 / 2), (0.75, 1))
DOWN = _ladder((0.0, 1), (0.25, 1 / 2), (0.5, 1 / 4), (0.75, 1 / 8))
# Few bits only when the learning rate has fallen.
LATE = _ladder((0.0, 4), (0.6, 1 / 4))


def _by_rate(low: float, high: float, mean: float) -> Method:
    """The higher level in those steps that have the largest learning rates, the lower one in all others. The rate is
    half a wave of a cosine up and another one down, so the highest share s of it are the last s of the rise and the
    first s of the fall.
    """
    share = (mean - low) / (high - low)
    budget = ((0.0, low), (round(RISE * (1 - share), 3), high), (round(RISE + (1 - RISE) * share, 3), low))
    return replace(_ladder(*budget), name=f"by rate {level(low)}-{level(high)}-{level(low)}, mean {level(mean)}")


BY_RATE = (_by_rate(1 / 4, 4, 2), _by_rate(1, 4, 2), _by_rate(1 / 4, 4, 1))
# The opposite: few bits while the rate is high.
AGAINST_RATE = _by_rate(4, 1 / 4, 2)
# As many steps at each level as a ladder has, in another order.
SHUFFLED = (
    _ladder((0.0, 4), (0.6, 1), (0.75, 2)),
    _ladder((0.0, 1 / 2), (0.25, 1 / 8), (0.5, 1), (0.75, 1 / 4)),
)

UNCOMPRESSED = Method("uncompressed", "uncompressed")
FP16 = Method("fp16", "fp16", budget=((0.0, 16),), small_bits=16)


# With the momentum that their authors train with.
POWERSGD = tuple(
    Method(f"PowerSGD rank {rank}", "powersgd", budget=((0.0, 1),), no_momentum_up_to=0, rank=rank) for rank in (1, 4)
)
TOP_K = Method("top-k 1/4", "top-k", budget=((0.0, 1 / 4),), no_momentum_up_to=0, small_bits=32)
# The paper's quantizer, read as literally as it can be: linear, one scale a tensor, nothing carried on.
PAPER_8 = Method("8, scale per tensor", "scale per tensor", budget=((0.0, 8),))
# Stochastic rounding, which needs no error feedback to be right on average.
QSGD = tuple(
    Method(f"QSGD {bits}", "qsgd", budget=((0.0, bits),), no_momentum_up_to=0, small_bits=32) for bits in (8, 4)
)


def _without(one: Method) -> tuple[Method, ...]:
    """The same with momentum kept, left out, and left out at half the rate."""
    return (
        replace(one, no_momentum_up_to=0),
        replace(one, name=f"{one.name}, no momentum"),
        replace(one, name=f"{one.name}, no momentum, c = 0.5", factor=0.5),
    )


def _powersgd(rank: int, start: float) -> tuple[Method, ...]:
    """With what the library gives itself: 8 bits for small tensors, momentum or none; and, as torch's hook has it with
    `start_powerSGD_iter`, uncompressed until so much of the training is over.
    """
    name = f"PowerSGD rank {rank}, small at 8" + (f", from {start:.0%}" if start else "")
    budget = ((0.0, 32), (start, 1)) if start else ((0.0, 1),)
    ways = _without(Method(name, "powersgd", budget=budget, small_bits=BITS_OF_SMALL, rank=rank))
    return ways[:2] if start else ways


# By rival: all that it is tried as. Which of them is the best, and at which rate, its tuning says.
RIVALS = {
    **{f"PowerSGD rank {rank}": _powersgd(rank, 0.0) for rank in (1, 2, 4)},
    **{f"PowerSGD rank {rank}, from 10 %": _powersgd(rank, 0.1) for rank in (1, 2, 4)},
    "top-k 1/4": (TOP_K, *_without(replace(TOP_K, small_bits=BITS_OF_SMALL, no_momentum_up_to=NO_MOMENTUM_UP_TO))[1:]),
}


def _ablations() -> list[Method]:
    levels = {method.name: method for method in ONE_LEVEL}
    found = []
    for one in (levels["1/4"], levels["1"]):
        found.append(replace(one, name=f"{one.name}, momentum kept", no_momentum_up_to=0))
        found += [replace(one, name=f"{one.name}, momentum {left}", momentum=left) for left in (0.7, 0.5)]
    found.append(replace(levels["2"], name="2, momentum kept", no_momentum_up_to=0))
    found += [replace(levels["2"], name=f"2, momentum {left}", momentum=left) for left in (0.7, 0.5)]
    found.append(replace(levels["3"], name="3, no momentum", no_momentum_up_to=3))
    found += [
        replace(levels[bits], name=f"{bits}, momentum {left}", momentum=left, no_momentum_up_to=4)
        for bits, left in (("4", 0.7), ("4", 0.5), ("3", 0.7), ("3", 0.5), ("1", 0.3))
    ]
    found += [
        replace(UNCOMPRESSED, name=f"uncompressed, momentum {left}", momentum=left, no_momentum_up_to=32)
        for left in (0.7, 0.5)
    ]
    found += [
        replace(one, name=f"{one.name}, no momentum", no_momentum_up_to=32) for one in (UNCOMPRESSED, levels["4"])
    ]
    found.append(replace(levels["1/4"], name="1/4, c = 0.5", factor=0.5))
    found.append(replace(POWERSGD[0], name="PowerSGD rank 1, no momentum", no_momentum_up_to=2))
    return found


# What the library had at 2 to 4 bits in versions 9 to 11 of its wire format, with all momentum: one scale for 512
# values, codes at equal distances. What else has such levels was trained before, with codes that clipped the largest
# values of a block.
NOT_CLIPPED = tuple(Method(f"{bits}, not clipped", budget=((0.0, bits),), no_momentum_up_to=0) for bits in (4, 3, 2))
# More bits first: 8, and so many when this part of the steps is over.
MORE_FIRST = tuple(
    replace(later, name=f"{later.name}, first {until:.0%} at 8", budget=((0.0, 8), (until, later.bits_at(1))))
    for later, until in (*((NOT_CLIPPED[0], until) for until in (0.03, 0.1, 0.3)), (NOT_CLIPPED[1], 0.1))
)
NOT_CLIPPED_LESS = replace(NOT_CLIPPED[2], name="2, not clipped, momentum 0.7", momentum=0.7, no_momentum_up_to=2)

# What it has since version 12, with all momentum: a scale for each 128 values, and codes that are closer to each other
# near zero. (At 2 bits they were codes of version 12 only.)
FINER = tuple(Method(f"{bits}, finer", budget=((0.0, bits),), no_momentum_up_to=0) for bits in (5, 4, 3, 2))
# Since version 13, with all momentum: four codes of unequal distance, or three.
FOUR_CODES = Method("2, four codes", budget=((0.0, 2),), no_momentum_up_to=0)
# At 6 % a learning rate that rose over 3 % of the steps has stayed high for as many.
FINER_FIRST = tuple(
    replace(FINER[1], name=f"{FINER[1].name}, first {until:.0%} at {bits}", budget=((0.0, bits), (until, 4)))
    for until, bits in ((0.03, 8), (0.06, 8), (0.1, 8), (0.1, 16))
)
# With what `less_momentum` leaves to Adam. (It left as much to SGD before it gave that Nesterov's.)
FINER_LESS = tuple(
    Method(f"{bits}, finer, momentum {left}", budget=((0.0, bits),), momentum=left, no_momentum_up_to=bits)
    for bits, left in ((2, 0.7), (1, 0.3))
)


def has_former_codes(method: Method) -> bool:
    """Whether the record's runs have codes of 1 to 7 bits that the library no longer has. (At 8 bits only the scales
    have changed, and next to nothing was lost before.)
    """
    if method.kind != QUANTIZED[0] or ", four codes" in method.name:
        return False
    finer = ", finer" in method.name
    return any(bits == 2 if finer else 1 <= bits < 8 for _, bits in method.budget)


def _nesterov(name: str, method: Method) -> Method:
    return replace(method, name=f"{name}, Nesterov", no_momentum_up_to=0, nesterov=True)


NESTEROV = (
    _nesterov("uncompressed", UNCOMPRESSED),
    *(_nesterov(method.name, method) for method in FINER[1:]),
    _nesterov("1, finer", _one(1)),
    *(_nesterov(level(bits), _one(bits)) for bits in (1 / 2, 1 / 4)),
)
FOUR_CODES_NESTEROV = _nesterov(FOUR_CODES.name, FOUR_CODES)
NESTEROV_BEFORE = (*(_nesterov(method.name, method) for method in NOT_CLIPPED[1:]), _nesterov("1", _one(1)))


def _first(bits: float, until: float) -> Method:
    """1/4 bit after `warmup_steps` at more."""
    return replace(_ladder((0.0, bits), (until, 1 / 4)), name=f"1/4, first {until:.0%} at {level(bits)}")


FIRST_STEPS = (_first(4, 0.1), _first(4, 0.3), _first(8, 0.1))

METHODS = {
    method.name: method
    for method in (
        *(UNCOMPRESSED, FP16, *ONE_LEVEL, *PAPER_LADDERS, UP, DOWN, LATE, *SHUFFLED, *BY_RATE, AGAINST_RATE),
        *(*POWERSGD, TOP_K, PAPER_8, *QSGD, *_ablations()),
        *(method for some in RIVALS.values() for method in some),
        *(*FIRST_STEPS, *NOT_CLIPPED, NOT_CLIPPED_LESS, *MORE_FIRST, *FINER, *FINER_FIRST, *FINER_LESS),
        *(*NESTEROV, *NESTEROV_BEFORE, FOUR_CODES, FOUR_CODES_NESTEROV),
    )
}

# Their runs are in the record, and cannot be trained any more: the history of version 0.1.0 has their code. "1/4 error"
# had a level for each tensor; policies steered by what was measured after each epoch.
POLICIES = ("plateau 1/8-1/2", "critical 1/8-1", "critical 1/8-2")
STEPS = ("step 1/8-1/4-1/2", "step down 1-1/4-1/8")
STEPS_ON_TEXT = tuple(f"{name}, text" for name in STEPS)
FEEDBACK = tuple(f"{bits}, {whose}" for bits in ("8", "4", "1/4") for whose in ("feedback of workers", "no feedback"))
RECORDED_RIVALS = {
    "DGC 1/4": ("DGC 1/4",),
    "random-k 1/4": tuple(f"random-k 1/4, no momentum{factor}" for factor in ("", ", c = 0.5", ", c = 0.1")),
    "LoCo 4": ("LoCo 4",),
    "natural, 9 bits": ("natural, 9 bits",),
    "1-bit Adam": ("1-bit Adam, from 15%", "1-bit Adam, from 30%"),
}
# Three codes of 2 bits, further apart than those that were chosen.
WIDER = ("2, scale 0.8 max", "2, scale 0.8 max, momentum 0.7")
RECORDED = frozenset(
    (
        *("1/4 error", *POLICIES, *STEPS, *STEPS_ON_TEXT, *FEEDBACK, *sum(RECORDED_RIVALS.values(), ()), *WIDER),
        *(method.name for method in METHODS.values() if has_former_codes(method)),
    )
)
