"""Which tensor travels at which level, so that the mean is within a budget of bits."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

#: What is left of the squared norm after one quantization (1 - d of equation 8), about: gradients of a ResNet.
LOST = {
    1 / 8: 0.87,
    1 / 4: 0.77,
    1 / 2: 0.62,
    1: 0.45,
    2: 0.16,
    3: 0.06,
    4: 0.018,
    5: 0.005,
    6: 0.0012,
    7: 3e-4,
    8: 7e-5,
}

# Harm done to a tensor of n values whose squares have the mean e, where the share `lost` of a step stays behind.
OBJECTIVES: dict[str, Callable[[float, float, float], float]] = {
    # the squared error of a step
    "error": lambda n, e, lost: n * e * lost,
    # the same without the tensors' scales
    "relative": lambda n, e, lost: n * lost,
    # half way between the two
    "root": lambda n, e, lost: n * e**0.5 * lost,
    # what is owed in the steady state, if gradients are independent
    "residual": lambda n, e, lost: n * e * lost / (1 - lost),
    # the bound of equation 8: gradients that point the same way step after step
    "delay": lambda n, e, lost: n * e * lost / (1 - lost) ** 2,
    "relative delay": lambda n, e, lost: n * lost / (1 - lost) ** 2,
    "root delay": lambda n, e, lost: n * e**0.5 * lost / (1 - lost) ** 2,
}


def allocate(
    sizes: Sequence[int],
    energies: Sequence[float],
    budget: float,
    *,
    objective: str,
    floors: Sequence[float],
    ceiling: float = 8,
) -> list[float]:
    """A level for each tensor: from its floor upwards, by the greatest gain for each further bit.

    Args:
        sizes: values of each tensor.
        energies: mean squares of their values.
        budget: mean bits a value of all tensors, without scales. Floors come first, even where they are above it.
        objective: a key of `OBJECTIVES`.
        floors: the lowest level of each tensor.
        ceiling: no level above this one.

    Returns:
        Levels of `LOST`.
    """
    harm = OBJECTIVES[objective]
    levels = [level for level in LOST if level <= ceiling]
    places = [levels.index(floor) for floor in floors]
    left = budget * sum(sizes) - sum(size * floor for size, floor in zip(sizes, floors, strict=True))
    waiting: list[tuple[float, int, int]] = []

    def offer(tensor: int) -> None:
        """Its best step up that can be paid; over several levels, where the next one alone gains little."""
        n, energy, here = sizes[tensor], energies[tensor], places[tensor]
        before = harm(n, energy, LOST[levels[here]])
        steps = []
        for up in range(here + 1, len(levels)):
            cost = n * (levels[up] - levels[here])
            if cost <= left:
                steps.append(((harm(n, energy, LOST[levels[up]]) - before) / cost, tensor, up))
        if steps:
            heapq.heappush(waiting, min(steps))

    for tensor in range(len(sizes)):
        offer(tensor)
    while waiting:
        _, tensor, up = heapq.heappop(waiting)
        cost = sizes[tensor] * (levels[up] - levels[places[tensor]])
        if cost <= left:
            left -= cost
            places[tensor] = up
        offer(tensor)
    return [levels[place] for place in places]
