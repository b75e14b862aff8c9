"""Steps that nobody has measured: up to 128 hosts of up to 8 workers, each with a core, at up to 100 Gbit/s."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.collectives import Hosts
from bench.cost_model import PAYLOAD, Machine, latency, seconds
from bench.cost_step import BUCKET_BYTES, Step, sizes, step

GBITS = (1, 10, 25, 100)
HOSTS, WORKERS = (2, 4, 8, 16, 32, 64, 128), (1, 2, 4, 8)
LARGEST = Hosts(128, 8)
BUCKETS_MIB = (1, 2, 4, 8, 16, 32, 64, 128)
# What a message takes over a network of today where nobody waits for a core: an assumption, to be seen beside what was
# fitted on shared cores.
ASSUMED_MS = 0.02


def machine(hosts: Hosts, gbit: float) -> Machine:
    """A core for each worker, and links of so many Gbit/s."""
    return Machine(hosts, hosts.workers, 1e9 * gbit * PAYLOAD)


def methods(bits: float) -> tuple[str, ...]:
    """Whose steps are predicted: Horovod's, and ours at one level of bits, in one level and in two."""
    return "none", "fp16", f"{bits}bit-flat", f"{bits}bit"


def assumed(constants: Mapping[str, float]) -> dict[str, float]:
    """The constants with messages that take no longer than `ASSUMED_MS`."""
    message = min(constants["message"], ASSUMED_MS)
    return {**constants, "message": message, "far": min(constants["far"], ASSUMED_MS - message)}


def _milliseconds(
    done: Step, hosts: Hosts, constants: Mapping[str, float], nanoseconds: Mapping[str, float]
) -> dict[str, float]:
    return {
        f"{gbit}gbit": round(1e3 * seconds(done, machine(hosts, gbit), constants, nanoseconds), 2) for gbit in GBITS
    }


def layouts(
    constants: Mapping[str, float], nanoseconds: Mapping[str, float], values: int, bits: float
) -> list[dict[str, Any]]:
    """All hosts and workers, all methods: the bytes that leave a host, and milliseconds a step at each rate.

    Args:
        constants, nanoseconds: see `model.seconds`.
        values: of the model.
        bits: of ours.
    """
    rows = []
    for hosts in (Hosts(number, workers) for workers in WORKERS for number in HOSTS):
        for method in methods(bits):
            done = _known(method, values, hosts)
            row: dict[str, Any] = {"hosts": hosts.number, "workers": hosts.workers, "contender": method}
            row["leaving_bytes"] = round(done.transfer.leaving)
            row["ms"] = _milliseconds(done, hosts, constants, nanoseconds)
            row["assumed_ms"] = _milliseconds(done, hosts, assumed(constants), nanoseconds)
            rows.append(row)
    return rows


def _known(method: str, values: float, hosts: Hosts, bucket_bytes: float = BUCKET_BYTES) -> Step:
    done = step(method, values, hosts, bucket_bytes)
    if done is None:
        raise ValueError(f"method must be one that the model knows, got {method!r}")
    return done


def buckets(
    constants: Mapping[str, float], nanoseconds: Mapping[str, float], values: int, bits: float
) -> list[dict[str, Any]]:
    """Ours in two levels on the most workers, for each bucket size: messages, and what they take whatever is in them.

    Arguments as of `layouts`. "ms" and "latency_ms" are of a step, with messages as fitted and as assumed.
    """
    rows = []
    for mib in BUCKETS_MIB:
        done = _known(f"{bits}bit", values, LARGEST, mib * 2**20)
        row: dict[str, Any] = {"bucket_mib": mib, "collectives": round(done.transfer.calls)}
        row["messages"] = round(done.transfer.far + done.transfer.near)
        size = sizes(bits, values, LARGEST, mib * 2**20)
        row["bytes"] = dict(zip(size._fields, map(round, size), strict=True))
        for name, chosen in (("fitted", constants), ("assumed", assumed(constants))):
            alone = latency(done, machine(LARGEST, 1), chosen)  # whatever the rate
            row[name] = {
                "ms": _milliseconds(done, LARGEST, chosen, nanoseconds),
                "latency_ms": round(1e3 * alone, 2),
            }
        rows.append(row)
    return rows
