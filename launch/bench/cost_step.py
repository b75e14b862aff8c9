"""What a step consists of: collectives and arithmetic, for Horovod and for ours in one level and in two."""

from __future__ import annotations

import math
from typing import NamedTuple

from bench.collectives import Hosts, Transfer, allgather, allreduce, alltoall
from hvd_dyncomp import LEVELS
from hvd_dyncomp.exchange.topology import dtype_within_host
from hvd_dyncomp.exchange.wire import HEADER_BYTES
from hvd_dyncomp.kernels import block_bytes

BLOCK_SIZE = 512
BUCKET_BYTES = 8 * 2**20
# Horovod fuses allreduces of tensors that are ready up to so many bytes,
_FUSION_BYTES = 64 * 2**20
# and allgathers as well; of our buckets it finds about two ready at a time (with more or fewer, Open MPI would have
# taken other algorithms than it did, by what the interfaces counted).
_FUSED_BUCKETS = 2
_OURS = {f"{bits}bit": bits for bits in LEVELS[:-1]}


class Kernels(NamedTuple):
    """Values that one worker puts through each kernel, in one step.

    Attributes:
        bits: the level; 0 if it is none of ours.
        encoded, decoded, decoded2: of one version; of two.
        reduced2: to the sum of two versions; each version more counts as
        added: of values.
    """

    bits: float = 0
    encoded: float = 0.0
    decoded: float = 0.0
    decoded2: float = 0.0
    reduced2: float = 0.0
    added: float = 0.0


class Step(NamedTuple):
    """One step of one method.

    Attributes:
        values: of the model.
        transfer: all collectives.
        phases: how many of them a bucket needs one after the other; Horovod negotiates those of all buckets together.
        copied: bytes that a worker hands to collectives and gets from them.
        float16: values that a worker converts, there and back.
        bfloat16: values that it rounds, or sums up, for or from its neighbours.
        kernels: see `Kernels`.
    """

    values: float
    transfer: Transfer = Transfer(calls=0.0)
    phases: int = 0
    copied: float = 0.0
    float16: float = 0.0
    bfloat16: float = 0.0
    kernels: Kernels = Kernels()


def step(method: str, values: float, hosts: Hosts, bucket_bytes: float = BUCKET_BYTES) -> Step | None:
    """What one method of the benchmarks does in a step; None for one that the model does not know.

    Args:
        method: alone, none, fp16, 4bit (in two levels where that is possible), 4bit-flat, or another level.
        values: of the model. Tensors that are too small to be compressed are taken as compressed.
        bucket_bytes: of float32, as `DynamicQuantizer` has it.
    """
    if method == "alone":
        return Step(values)
    if method in ("none", "fp16"):
        nbytes = values * (4 if method == "none" else 2)
        number = math.ceil(nbytes / _FUSION_BYTES)
        transfer = allreduce(nbytes / number, hosts).times(number)
        return Step(values, transfer, 1, 2 * nbytes, values if method == "fp16" else 0.0)
    name = method.removesuffix("-flat")
    if name not in _OURS:
        return None
    apart = name == method and hosts.number > 1 and hosts.workers > 1
    return (_hierarchical if apart else _flat)(_OURS[name], values, bucket_bytes / 4, hosts)


def message(values: float, bits: float) -> float:
    """Bytes of a message with the codes of so many values."""
    return HEADER_BYTES + values * block_bytes(bits, BLOCK_SIZE) / BLOCK_SIZE


def _flat(bits: float, values: float, bucket: float, hosts: Hosts) -> Step:
    ranks, number = hosts.ranks, math.ceil(values / bucket)
    shared = 1 if ranks == 2 else ranks  # of two, each hands over all
    sent = message(values / number / shared, bits)
    scatters = alltoall(sent, ranks - hosts.workers, hosts.workers - 1, hosts).times(number)
    gathered = message(bucket / shared, bits) * ranks * values / bucket
    if ranks == 2:
        return Step(values, scatters, 1, 1.5 * gathered, kernels=Kernels(bits, values, decoded2=values))
    gathers = _gathers(bits, values / ranks, bucket / ranks, hosts)
    kernels = Kernels(bits, values, values, 0.0, values / ranks, (ranks - 2) * values / ranks)
    return Step(values, scatters + gathers, 2, 3 * gathered, kernels=kernels)


def _gathers(bits: float, values: float, bucket: float, hosts: Hosts) -> Transfer:
    """Of each worker's share of all buckets, some at a time."""
    number, rest = divmod(values, _FUSED_BUCKETS * bucket)
    whole = allgather(_FUSED_BUCKETS * message(bucket, bits), hosts).times(number)
    return whole + allgather(message(rest, bits), hosts) if rest else whole


class Sizes(NamedTuple):
    """Bytes of one message of each phase in two levels.

    Attributes:
        scatter: to a neighbour, its section in floats.
        between: to a worker on another host.
        gather: to a neighbour, what has come of the section.
    """

    scatter: float
    between: float
    gather: float


def sizes(bits: float, values: float, hosts: Hosts, bucket_bytes: float = BUCKET_BYTES) -> Sizes:
    """Of the exchange in two levels of a model with so many values, in buckets of equal size."""
    section = values / math.ceil(4 * values / bucket_bytes) / hosts.workers
    scatter = HEADER_BYTES + section * _float_bytes(bits)
    if hosts.number == 2:
        return Sizes(scatter, message(section, bits), 2 * message(section, bits))
    shard = message(section / hosts.number, bits)
    return Sizes(scatter, shard, hosts.number * shard)


def _float_bytes(bits: float) -> int:
    return dtype_within_host(bits).itemsize


def _hierarchical(bits: float, values: float, bucket: float, hosts: Hosts) -> Step:
    far, near, number = hosts.number - 1, hosts.workers - 1, math.ceil(values / bucket)
    size = sizes(bits, values, hosts, 4 * bucket)
    between, phases = alltoall(size.between, far, 0, hosts), 3
    section = values / hosts.workers
    if hosts.number == 2:
        kernels = Kernels(bits, section, decoded2=values)
    else:
        between, phases = between.times(2), 4  # a scatter and a gather
        shard = section / hosts.number
        kernels = Kernels(bits, section, values, 0.0, shard, (hosts.number - 2) * shard)
    transfer = alltoall(size.scatter, 0, near, hosts) + between + alltoall(size.gather, 0, near, hosts)
    # Each phase sends as much as it receives, its own part included, but for the first.
    copied = 2 * (near * size.scatter + 2 * size.gather + hosts.workers * size.gather)
    floats = 2 * near * section
    return Step(values, transfer.times(number), phases, copied * number, bfloat16=floats, kernels=kernels)
