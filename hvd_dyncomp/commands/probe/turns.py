"""Times steppers against each other: all in one process group, in turns, in another order each round.

What else the machine does in the meantime then touches all of them alike. Methods whose steps are long take fewer
turns, spread evenly over the rounds.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hvd_dyncomp.commands import ranks
from hvd_dyncomp.commands.probe.methods import Stepper
from hvd_dyncomp.transport.base import gather_json

Counter = Callable[[], int]
Progress = Callable[[int, int], object]  # is told how many turns are over, and how many there are

_INTERFACES = Path("/sys/class/net")  # Linux
_LOOPBACK = "lo"


def interface(name: str) -> Counter:
    """A counter of the bytes that an interface of this host has sent since it was made."""
    place = _INTERFACES / name / "statistics" / "tx_bytes"
    return lambda: int(place.read_text())


def busiest(work: Callable[[], object], least: int) -> Counter | None:
    """The counter of the interface that sends most while something is done; None if none sends so many bytes."""
    names = [each.name for each in _INTERFACES.iterdir()] if _INTERFACES.exists() else []
    counters = {name: interface(name) for name in names if name != _LOOPBACK}
    before = {name: counter() for name, counter in counters.items()}
    work()
    sent = {name: counter() - before[name] for name, counter in counters.items()}
    name = max(sent, key=sent.__getitem__, default=_LOOPBACK)
    return counters[name] if sent.get(name, 0) >= max(least, 1) else None


def timed(stepper: Stepper) -> float:
    """Seconds of one step on this rank, from a moment at which all ranks stand ready. Collective.

    A GPU has nothing left to do at the beginning, and at the end.
    """
    stepper.finish()
    ranks.barrier()
    began = time.perf_counter()
    stepper.step()
    stepper.finish()
    return time.perf_counter() - began


def slowest(seconds: float, name: str) -> float:
    """The largest of all ranks' numbers, on every rank. Collective."""
    return max(gather_json(ranks.transport(), seconds, f"alternation.slowest.{name}"))


def turns_of(costs: Mapping[str, float], *, seconds: float, rounds: int) -> dict[str, int]:
    """How many steps each stepper gets in about so many seconds: equal time for all, 2 to `rounds` steps each."""
    share = seconds / len(costs)
    return {name: min(rounds, max(2, int(share / cost))) for name, cost in costs.items()}


def takes_part(turn: int, turns: int, rounds: int) -> bool:
    """Whether a stepper with so many turns has one in this round; turns are spread evenly."""
    return (turn + 1) * turns // rounds > turn * turns // rounds


def measure(
    steppers: Mapping[str, Stepper],
    *,
    seconds: float,
    rounds: int,
    seed: int,
    counter: Counter | None,
    said: Progress | None = None,
) -> dict[str, dict[str, Any]]:
    """Let the steppers take turns for about `seconds` seconds. Collective.

    Args:
        steppers: by name, the same on all ranks; their first steps, with what they build once, are over.
        seconds: for all of them together; long steps may take more.
        rounds: the most turns for one stepper.
        seed: of the order, the same on all ranks.
        counter: of what this host has sent; None: not counted. Every rank has one, or none has.
        said: called after each turn.

    Returns:
        For each stepper "ms", the time of each of its steps on the slowest rank, and "sent", the bytes of each host
        in each of its steps (empty without a counter). The same on all ranks.
    """
    costs = {name: slowest(timed(stepper), "cost") for name, stepper in steppers.items()}
    turns = turns_of(costs, seconds=seconds, rounds=rounds)
    most = max(turns.values())
    mine: dict[str, list[tuple[float, int]]] = {name: [] for name in steppers}
    over = 0
    for turn in range(most):
        order = [name for name in steppers if takes_part(turn, turns[name], most)]
        random.Random(f"{seed} {turn}").shuffle(order)
        for name in order:
            before = counter() if counter else 0
            took = timed(steppers[name])
            ranks.barrier()  # what the others wait for has then left this host, too
            mine[name].append((took, counter() - before if counter else 0))
            over += 1
            if said is not None:
                said(over, sum(turns.values()))
    everyone = gather_json(ranks.transport(), mine, "alternation.samples")
    # All workers of a host read the same counter, which counts what any of them sends.
    speaks = gather_json(ranks.transport(), counter is not None and ranks.local_rank() == 0, "alternation.counters")
    return {name: _merge([rank[name] for rank in everyone], speaks) for name in steppers}


def _merge(ranks: list[list[tuple[float, int]]], speaks: list[bool]) -> dict[str, Any]:
    steps = list(zip(*ranks, strict=True))
    sent = [[sent for (_, sent), one in zip(step, speaks, strict=True) if one] for step in steps]
    return {
        "ms": [round(1e3 * max(took for took, _ in step), 3) for step in steps],
        "sent": sent if any(speaks) else [],
    }
