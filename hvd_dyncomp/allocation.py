"""Where the bits of a budget do the most good: a level for each tensor (docs/math.md, equation 11)."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

#: What a level leaves of the squared norm of gradient and residual, by `launch/study.py --simulate lost`.
LOST: dict[float, float] = {
    **{0.125: 0.91, 0.25: 0.83, 0.5: 0.70, 1: 0.51, 2: 0.20, 3: 0.086},
    **{4: 0.020, 5: 0.0051, 6: 0.0012, 7: 2.9e-4, 8: 7.1e-5},
}
LEAST, *_ = LOST


def error(energies: Sequence[float], levels: Sequence[float]) -> float:
    """The squared error of one step of all tensors together.

    Args:
        energies: the squared norm of each tensor's gradient.
        levels: its level, one of `LOST`.
    """
    return sum(energy * LOST[bits] for energy, bits in zip(energies, levels, strict=True))


def allocate(sizes: Sequence[int], energies: Sequence[float], budget: float) -> tuple[float, ...]:
    """The levels of least `error` within a budget, tensor by tensor; equal arguments give equal levels everywhere.

    All tensors begin at the lowest level. Then, as long as there are bits, the step up is made that takes away most
    error for each bit that it costs; a step may leave out levels at which too little would be gained. Of equal steps
    the first tensor's is made.

    Args:
        sizes: values of each tensor, as many as it is charged for.
        energies: as `error` has them.
        budget: mean bits a value. Where it is less than the lowest level, that serves.

    Returns:
        Levels of `LOST`, one a tensor.
    """
    ladder = tuple(LOST)
    steps_up = _steps_up()
    places = [0] * len(sizes)
    left = (budget - LEAST) * sum(sizes)
    waiting: list[tuple[float, int]] = []

    def offer(tensor: int) -> None:
        step = steps_up.get(places[tensor])
        if step is not None:
            heapq.heappush(waiting, (-energies[tensor] * step[1] / sizes[tensor], tensor))

    for tensor in range(len(sizes)):
        offer(tensor)
    while waiting:
        _, tensor = heapq.heappop(waiting)
        to, _ = steps_up[places[tensor]]
        cost = sizes[tensor] * (ladder[to] - ladder[places[tensor]])
        if cost > left:
            continue  # a smaller tensor may still be paid
        left -= cost
        places[tensor] = to
        offer(tensor)
    return tuple(ladder[place] for place in places)


def _steps_up() -> dict[int, tuple[int, float]]:
    """From each place on the ladder the best step up, and what it takes away of the energy for each bit.

    These are the corners of the lower convex hull of (bits, lost): from one to the next, gains only get smaller.
    """
    points = list(LOST.items())
    found, here = {}, 0
    while here + 1 < len(points):
        bits, lost = points[here]
        gain, to = max(((lost - points[up][1]) / (points[up][0] - bits), -up) for up in range(here + 1, len(points)))
        found[here] = (-to, gain)
        here = -to
    return found
