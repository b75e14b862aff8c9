"""The only file that talks to Horovod.

Every collective here takes the name it travels under. Horovod matches collectives by name, so a name must be the same
on all ranks and must not depend on the order of calls or on the type of what is sent.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from hvd_dyncomp.errors import HorovodMissing

try:
    import horovod.torch as hvd
    from horovod.torch.compression import Compressor
    from horovod.torch.elastic.state import StateHandler, get_handler_registry
except ImportError as _error:
    raise HorovodMissing(
        "hvd_dyncomp needs Horovod built for torch: run 'make setup' in a clone of hvd_dyncomp, "
        "or build it as https://horovod.readthedocs.io/en/stable/install.html says"
    ) from _error

__all__ = [
    "Compressor",
    "StateHandler",
    "averaging_factor",
    "gather_json",
    "poll",
    "rank_and_size",
    "register_state_handler",
    "start_allgather",
    "start_alltoall",
    "start_sum",
    "wait",
]


def rank_and_size(process_set=None) -> tuple[int, int]:
    """(rank, world size) within `process_set`, or among all workers.

    Raises:
        ValueError: `hvd.init()` has not been called.
    """
    if process_set is None:
        return hvd.rank(), hvd.size()
    return process_set.rank(), process_set.size()


def averaging_factor(op: object, world_size: int) -> float:
    """What a sum over ranks is multiplied by under Horovod's reduction `op`.

    Raises:
        ValueError: the reduction is not linear in the gradients (Adasum, Min, ...).
    """
    if op == hvd.Average:
        return 1.0 / world_size
    if op == hvd.Sum:
        return 1.0
    name = "Adasum" if op == hvd.Adasum else repr(op)
    raise ValueError(f"DynamicQuantizer works with op=hvd.Average and op=hvd.Sum, got op={name}")


def start_alltoall(tensor: torch.Tensor, splits: list[int], name: str, process_set) -> int:
    """Starts sending `splits[r]` bytes of the uint8 vector `tensor` to each rank r; returns a handle."""
    return hvd.alltoall_async(tensor, torch.tensor(splits, dtype=torch.int32), name, process_set)


def start_allgather(tensor: torch.Tensor, name: str, process_set) -> int:
    """Starts gathering every rank's uint8 vector, in rank order; lengths may differ; returns a handle."""
    return hvd.allgather_async(tensor, name, hvd.global_process_set if process_set is None else process_set)


def start_sum(tensor: torch.Tensor, name: str, process_set) -> int:
    """Starts adding up every rank's int64 `tensor`, in its own memory; returns a handle."""
    everyone = hvd.global_process_set if process_set is None else process_set
    return hvd.allreduce_async_(tensor, name=name, op=hvd.Sum, process_set=everyone)


def poll(handle: int) -> bool:
    """Whether `wait(handle)` would return at once."""
    return hvd.poll(handle)


def wait(handle: int) -> torch.Tensor:
    """Blocks until the collective is done and returns what was received."""
    received = hvd.synchronize(handle)
    return received[0] if isinstance(received, tuple) else received


def gather_json(value: Any, name: str, process_set=None) -> list[Any]:
    """Every rank's `value`, in rank order, on every rank. Collective over the process set (all workers), blocking.

    JSON, because what comes from another worker should be data and never code, and because an allgather of bytes does
    not care whether the ranks agree about the shape of what they send: a disagreement can be seen and named, where an
    allreduce or a broadcast would fail or hang.

    Args:
        value: plain data (dicts, lists, numbers with NaN and infinities, strings, None).
        name: what the collective is called on the wire.
    """
    text = json.dumps(value)
    if rank_and_size(process_set)[1] == 1:
        return [json.loads(text)]
    # json.dumps never emits a newline by itself, so that a newline can end a rank's text.
    sent = torch.frombuffer(bytearray(text.encode() + b"\n"), dtype=torch.uint8)
    received = wait(start_allgather(sent, name, process_set))
    return [json.loads(line) for line in received.numpy().tobytes().splitlines()]


def register_state_handler(kind: type, handler: type[StateHandler]) -> None:
    """Has `hvd.elastic.TorchState` keep objects of a kind by a handler, instead of pickling them."""
    registry = get_handler_registry()
    if (kind, handler) not in registry:
        registry.append((kind, handler))
