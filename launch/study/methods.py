"""What is compared: every way of sending gradients, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, replace

# (from which fraction of the training on, mean bits a value)
Schedule = tuple[tuple[float, float], ...]

# What the library does by itself: tensors of fewer values than `aggregation.SMALL` travel at 8 bits where the level is
# less.
BITS_OF_SMALL = 8


@dataclass(frozen=True)
class Method:
    """One way of sending gradients; without further words what the library does, with the optimizer's whole momentum.

    Attributes:
        name: unique; stands in the record and, as `shown` has it, in the tables.
        kind: a key of `comparators.BY_KIND`.
        budget: bits a value as training goes on. A level of the library where it is quantized. At 32 every
            method sends float32. (PowerSGD has ranks for bits: its budget says when, and not how many.)
        small_bits: of small tensors: 32, 16 (rounded to float16) or 8; 0: as the library has it.
        momentum: at the last of its levels so much is left to large tensors of the optimizer's; None: all of it.
        factor: c of the rate there, c (1 - left) / (1 - m) of the task's: 1 is as much progress a step as with it.
        rank: of PowerSGD.
        nesterov: momentum is Nesterov's, of AdamW as `torch.optim.NAdam` has it.
    """

    name: str
    kind: str = "quantized"
    budget: Schedule = ((0.0, 32),)
    small_bits: int = 0
    momentum: float | None = None
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
        return self.small_bits or (bits if self.kind == "quantized" else 32)

    def momentum_at(self, progress: float) -> float | None:
        """What is left of the optimizer's momentum, when so much of the training is over; None: all of it."""
        return None if self.bits_at(progress) > self.bits_at(1) else self.momentum


def shown(name: str) -> str:
    """How a method is called in tables and figures."""
    for bits in (8, 4, 2):
        name = name.replace(f"1/{bits}", f"{1 / bits:g}")
    return name.replace(", c = ", ", step size x ")


def level(bits: float) -> str:
    """1/4 for 0.25."""
    return f"1/{round(1 / bits)}" if bits < 1 else f"{bits:g}"


def _at(bits: float, left: float | None = None) -> Method:
    word = {None: "", 0.0: ", no momentum"}.get(left, f", momentum {left}")
    return Method(level(bits) + word, budget=((0.0, bits),), momentum=left)


def _first(later: Method, until: float, bits: float) -> Method:
    """After more bits in the first steps."""
    return replace(
        later, name=f"{later.name}, first {until:.0%} at {bits}", budget=((0.0, bits), (until, later.bits_at(1)))
    )


UNCOMPRESSED = Method("uncompressed", "uncompressed")
FP16 = Method("fp16", "fp16", budget=((0.0, 16),), small_bits=16)
WHOLE = tuple(_at(bits) for bits in (8, 5, 4, 3, 2, 1 / 4))
# With what `less_momentum` leaves to Adam. (It gives SGD Nesterov's momentum at 1 and 2 bits.)
LESS = (_at(2, 0.7), _at(1, 0.3), *(_at(bits, 0.0) for bits in (1 / 4, 1 / 8)))
HALF_AS_FAST = replace(LESS[2], name=f"{LESS[2].name}, c = 0.5", factor=0.5)
# More bits in the first steps. At 6 % a learning rate that rose over 3 % of the steps has stayed high for as many.
MORE_FIRST = tuple(_first(_at(4), until, bits) for until, bits in ((0.03, 8), (0.06, 8), (0.1, 8), (0.1, 16)))
MORE_BEFORE_FEW = _first(LESS[2], 0.1, 8)
NESTEROV = tuple(
    replace(method, name=f"{method.name}, Nesterov", nesterov=True)
    for method in (UNCOMPRESSED, *map(_at, (4, 3, 2, 1, 1 / 2, 1 / 4)))
)
LESS_UNCOMPRESSED = tuple(
    replace(UNCOMPRESSED, name=f"uncompressed, {word}", momentum=left)
    for word, left in (("no momentum", 0.0), ("momentum 0.7", 0.7))
)

# As their authors have them.
POWERSGD = Method("PowerSGD rank 4", "powersgd", budget=((0.0, 1),), rank=4)
TOP_K = Method("top-k 1/4", "top-k", budget=((0.0, 1 / 4),), small_bits=32)


def _without(one: Method) -> tuple[Method, ...]:
    """The same with momentum kept, left out, and left out at half the rate."""
    return (
        one,
        replace(one, name=f"{one.name}, no momentum", momentum=0.0),
        replace(one, name=f"{one.name}, no momentum, c = 0.5", momentum=0.0, factor=0.5),
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
    "top-k 1/4": (TOP_K, *_without(replace(TOP_K, small_bits=BITS_OF_SMALL))[1:]),
}

METHODS = {
    method.name: method
    for method in (
        *(UNCOMPRESSED, FP16, *WHOLE, *LESS, HALF_AS_FAST, *MORE_FIRST, MORE_BEFORE_FEW, *NESTEROV, *LESS_UNCOMPRESSED),
        *(POWERSGD, *(method for some in RIVALS.values() for method in some)),
    )
}
