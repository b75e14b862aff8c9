"""What is compared: every way of sending gradients, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from screening.allocation import OBJECTIVES

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
        objective: a key of `allocation.OBJECTIVES`: a level for each tensor, anew in every epoch. Empty: all alike.
        floor: no tensor below this level, where each has its own.
        small_floor: no tensor below this level that has less than a twentieth of all values.
        ends: level of the first and of the last large tensor; 0 for what the others have.
        turns: levels below one bit are not sparse codes, but blocks that take turns at this many bits.
        bound: what is owed may add so many times a block's norm at one bit and more; at b < 1 bits, bound / b.
        momentum: workers send their momentum and not their gradients (Lin et al., 2018).
        mask: where a worker's momentum has been sent, it starts from zero.
        flat: what they send is gradients as large as momentum would become, at once.
        track: see `feedback.Way`.
        whiten: values are divided by how large they usually are, which workers tell each other now and then.
        follow_rate: what is owed is owed as a step of the weights: it grows as the learning rate falls.
        decay: what is owed is multiplied by this in every step.
        rank: of PowerSGD.
    """

    name: str
    method: str = "quantized"
    budget: Schedule = ((0.0, 32),)
    objective: str = ""
    floor: float = 1 / 8
    small_floor: float = 1 / 8
    ends: float = 0
    turns: int = 0
    bound: float = 2
    momentum: bool = False
    mask: bool = False
    flat: bool = False
    track: bool = False
    whiten: bool = False
    follow_rate: bool = False
    decay: float = 1
    rank: int = 0

    def __post_init__(self) -> None:
        if self.method not in METHODS or self.objective not in {"", *OBJECTIVES}:
            raise ValueError(f"no such method or objective: {self}")

    def bits_at(self, progress: float) -> float:
        """The budget when so much of the training is over (0 to 1)."""
        return [bits for start, bits in self.budget if start <= progress][-1]


def level_name(bits: float) -> str:
    """1/4 for 0.25."""
    return f"1/{round(1 / bits)}" if bits < 1 else f"{bits:g}"


def _schedule(*parts: float) -> Schedule:
    """Bits, then pairs of a start and bits."""
    return ((0.0, parts[0]), *zip(parts[1::2], parts[2::2], strict=True))


def _all() -> list[Contender]:
    below, one = (1 / 8, 1 / 4, 1 / 2), (1, 2)
    found = [Contender("uncompressed", "uncompressed")]
    for bits in (*below, *one, 4):
        found.append(Contender(f"{level_name(bits)}", budget=_schedule(bits)))
    for bits in (*below, *one, 4):
        name = level_name(bits)
        found += [
            Contender(f"{name} whiten", budget=_schedule(bits), whiten=True),
            Contender(f"{name} wide", budget=_schedule(bits), bound=8),
            Contender(f"{name} unbounded", budget=_schedule(bits), bound=1e6),
            Contender(f"{name} whiten wide", budget=_schedule(bits), whiten=True, bound=8),
        ]
    for bits in one:
        found.append(Contender(f"{bits} momentum", budget=_schedule(bits), momentum=True))
        found.append(Contender(f"{bits} track", budget=_schedule(bits), momentum=True, track=True))
    for bits in below:
        name = level_name(bits)
        found += [
            Contender(f"{name} turns", budget=_schedule(bits), turns=1),
            Contender(f"{name} turns of 2", budget=_schedule(bits), turns=2),
            Contender(f"{name} ends 2", budget=_schedule(bits), ends=2),
            Contender(f"{name} follow", budget=_schedule(bits), follow_rate=True),
            Contender(f"{name} decay", budget=_schedule(bits), decay=0.97),
            Contender(f"{name} momentum", budget=_schedule(bits), momentum=True),
            Contender(f"{name} momentum mask", budget=_schedule(bits), momentum=True, mask=True),
            Contender(f"{name} flat", budget=_schedule(bits), momentum=True, flat=True),
            Contender(f"1-{name} momentum mask", budget=_schedule(1, 0.3, bits), momentum=True, mask=True),
            Contender(f"{name}-1 momentum mask", budget=_schedule(bits, 0.8, 1), momentum=True, mask=True),
            Contender(f"1-{name}-1 momentum mask", budget=_schedule(1, 0.1, bits, 0.8, 1), momentum=True, mask=True),
            Contender(
                f"{name} momentum mask error", budget=_schedule(bits), momentum=True, mask=True, objective="error"
            ),
            Contender(f"{name} turns momentum", budget=_schedule(bits), turns=1, momentum=True),
            Contender(f"{name} momentum wide", budget=_schedule(bits), momentum=True, bound=8),
            Contender(f"{name} whiten momentum mask", budget=_schedule(bits), momentum=True, mask=True, whiten=True),
            Contender(f"{name} turns whiten", budget=_schedule(bits), turns=1, whiten=True),
            Contender(f"{name} track", budget=_schedule(bits), momentum=True, track=True),
            Contender(f"2-{name} momentum mask", budget=_schedule(2, 0.1, bits), momentum=True, mask=True),
            Contender(f"1-{name}-1 momentum", budget=_schedule(1, 0.1, bits, 0.8, 1), momentum=True),
            Contender(f"1-{name} half", budget=_schedule(1, 0.5, bits)),
            Contender(f"{name}-1 half", budget=_schedule(bits, 0.5, 1)),
            Contender(f"2-{name}", budget=_schedule(2, 0.1, bits)),
            Contender(f"{name}-2", budget=_schedule(bits, 0.8, 2)),
            Contender(f"{name}-1", budget=_schedule(bits, 0.8, 1)),
            Contender(f"2-{name}-2", budget=_schedule(2, 0.1, bits, 0.9, 2)),
            Contender(f"1-{name}-1", budget=_schedule(1, 0.1, bits, 0.8, 1)),
            Contender(f"1-{name}-1 turns", budget=_schedule(1, 0.1, bits, 0.8, 1), turns=1),
            Contender(f"{name}-2 turns", budget=_schedule(bits, 0.8, 2), turns=1),
        ]
    for bits in (*below, 1):
        for objective in OBJECTIVES:
            found.append(Contender(f"{level_name(bits)} {objective}", budget=_schedule(bits), objective=objective))
    for bits in (1 / 2, 1 / 4):
        name = level_name(bits)
        found += [
            Contender(f"{name} error, small 1", budget=_schedule(bits), objective="error", small_floor=1),
            Contender(f"{name} relative, small 1", budget=_schedule(bits), objective="relative", small_floor=1),
            Contender(f"{name} error, floor 1/4", budget=_schedule(bits), objective="error", floor=1 / 4),
        ]
    found += [
        Contender("up 1/8-1/4-1/2-1", budget=_schedule(1 / 8, 0.25, 1 / 4, 0.5, 1 / 2, 0.75, 1)),
        Contender("down 1-1/2-1/4-1/8", budget=_schedule(1, 0.25, 1 / 2, 0.5, 1 / 4, 0.75, 1 / 8)),
        *(Contender(f"PowerSGD rank {rank}", "powersgd", rank=rank) for rank in (1, 2, 4)),
        *(Contender(f"top-k {level_name(bits)}", "top-k", budget=_schedule(bits)) for bits in below),
        *(Contender(f"random-k {level_name(bits)}", "random-k", budget=_schedule(bits)) for bits in (*below, 1)),
        Contender("natural", "natural"),
    ]
    return found


CONTENDERS = {contender.name: contender for contender in _all()}
