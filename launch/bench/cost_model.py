"""From what a step consists of to how long it takes: a sum of terms, each a constant times what it is a constant of.

    workers per core *
      (hand * values + kernels + copy * bytes + float16 * values + bfloat16 * values + inside * bytes on the host
       + message * messages + far * messages between hosts)
    + link * max(bytes that leave the host / rate, interface * bytes * workers per core)
    + cycle * phases + call * collectives
    + (workers per core - 1) * idle * bytes that leave the host / rate

Arithmetic and transfer are added up: measured so where a worker has one core. What overlaps makes steps shorter than
this: on better machines, and of two workers, since they exchange by alltoalls. Where workers share a core, each waits
for the others' arithmetic, messages wait for a turn of who is to receive them, and so does the link: the last line,
which is nothing where each has a core.

Left out: tensors too small to be compressed, handshakes, the network's topology, and what others send over it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from bench.collectives import Hosts
from bench.cost_step import Kernels, Step

# Of a rate, what TCP has for its payload: packets of 1500 bytes, with Ethernet's headers around them.
PAYLOAD = 1448 / 1514

UNITS = {
    "hand": ("ns per value", "backward hands over, the optimizer updates"),
    "copy": ("ns per byte", "into Horovod's and MPI's buffers and out of them"),
    "float16": ("ns per value", "Horovod's fp16: there and back"),
    "bfloat16": ("ns per value", "rounded for a neighbour, or one's summed up"),
    "inside": ("ns per byte", "over shared memory, between two workers of a host"),
    "link": ("times", "of what the link's payload rate says"),
    "interface": ("ns per byte", "what a core takes to send and receive over TCP"),
    "cycle": ("ms per phase", "until Horovod has agreed about what a bucket needs next"),
    "call": ("ms per collective", "each in its turn in Horovod's thread"),
    "message": ("ms per message", "one after the other, within a host or between two"),
    "far": ("ms per message", "more, if between two hosts"),
    "idle": ("times the link's time", "for each worker per core more than one"),
}
# What a constant has to be multiplied by to be in seconds.
_SECONDS = {"ns": 1e-9, "ms": 1e-3, "times": 1.0}
# It decides which of two is the longer, and cannot be fitted like the others, which are factors.
INTERFACE = "interface"


class Machine(NamedTuple):
    """Where a step is taken.

    Attributes:
        hosts: see `Hosts`.
        cores: of each host; less than one where hosts share cores.
        rate: payload in bits a second that leaves a host; infinite where there is one host.
    """

    hosts: Hosts
    cores: float
    rate: float

    @property
    def load(self) -> float:
        """Workers per core, at least 1."""
        return max(1.0, self.hosts.workers / self.cores)


def kernel_seconds(used: Kernels, nanoseconds: Mapping[str, float]) -> float:
    """What one worker's arithmetic takes.

    Args:
        used: how many values by which kernel.
        nanoseconds: per value, by the names of docs/data/bench/kernels.json.
    """
    if not used.bits:
        return 0.0
    names = {"encode": used.encoded, "decode": used.decoded + used.added, "decode 2": used.decoded2}
    names["reduce 2"] = used.reduced2
    return 1e-9 * sum(nanoseconds[f"{used.bits} {name}"] * values for name, values in names.items())


def terms(step: Step, machine: Machine, interface: float) -> dict[str, float]:
    """Seconds that a step takes for each unit of each constant (`UNITS`), given the constant "interface"."""
    load, moved = machine.load, step.transfer
    on_link = 8 * moved.leaving / machine.rate
    # A host's workers share its interface, but each has a core for it.
    per_core = moved.leaving / machine.hosts.workers * load
    found = {
        "hand": step.values * load,
        "copy": step.copied * load,
        "float16": step.float16 * load,
        "bfloat16": step.bfloat16 * load,
        "inside": moved.staying * load,
        "link": max(on_link, 1e-9 * interface * per_core),
        "cycle": step.phases,
        "call": moved.calls,
        "message": (moved.far + moved.near) * load,
        "far": moved.far * load,
        "idle": on_link * (load - 1),
    }
    return {name: number * _SECONDS[UNITS[name][0].split()[0]] for name, number in found.items()}


def seconds(step: Step, machine: Machine, constants: Mapping[str, float], nanoseconds: Mapping[str, float]) -> float:
    """How long a step takes.

    Args:
        constants: by the names and in the units of `UNITS`.
        nanoseconds: see `kernel_seconds`.
    """
    parts = terms(step, machine, constants[INTERFACE])
    known = machine.load * kernel_seconds(step.kernels, nanoseconds)
    return known + sum(constants[name] * part for name, part in parts.items())


def latency(step: Step, machine: Machine, constants: Mapping[str, float]) -> float:
    """The part of `seconds` that would be there if nothing were in the messages."""
    parts = terms(step, machine, constants[INTERFACE])
    return sum(constants[name] * parts[name] for name in ("cycle", "call", "message", "far"))
