"""The check that all ranks hold the same parameters, bit for bit: what parts them is often a mistake that nobody sees.

The first greeting after `Controller.step` has one number for all parameters of a model. Only if those differ, ranks
exchange one for each parameter. It is `zlib.crc32` of the parameter's bytes in logical order: 46 ms for 25.6 million
float32 values. The bits of NaNs count as well: all ranks decode the same bytes, Gloo and MPI give all ranks the same
sum, and equal hosts make the same bits of them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence

import torch
from torch.nn.parameter import is_lazy

from hvd_dyncomp.errors import LockstepError
from hvd_dyncomp.transport.base import Transport, gather_or_raise

Named = Sequence[tuple[str, torch.Tensor]]  # (name, parameter) pairs

_PART = 2**23  # values that are copied at a time, of a GPU
_CAUSES = (
    "Usual causes: gradients were not exchanged (every forward pass ran in no_sync; or, after the model was wrapped, a "
    "module was unfrozen or added, or load_state_dict(assign=True) was called); the optimizer stepped before gradients "
    "were averaged (LBFGS, hooks that step); the ranks started with different parameters. If the ranks are meant to "
    "differ, pass Controller(..., check_replicas=False)"
)


def compare(transport: Transport, trained: Callable[[], Named], name: str) -> None:
    """Compare each parameter. Collective.

    Args:
        transport: connects the ranks.
        trained: returns this rank's parameters.
        name: of the collective.

    Raises:
        LockstepError: a parameter differs, on every rank; or another rank cannot read its parameters.
        Exception: this rank cannot.
    """
    mine, error = None, None
    try:
        mine = numbers(trained())
    except Exception as own:  # noqa: BLE001  # raised when the other ranks have heard of it
        error = own
    found = difference(gather_or_raise(transport, mine, error, name, "cannot compare its parameters"))
    if found:
        raise LockstepError(found)


def difference(everyone: Sequence[Mapping[str, int] | None]) -> str:
    """Which parameter is not the same on two ranks, in words; "" if all are.

    Args:
        everyone: what `numbers` has returned on each rank; None for a rank that does not compare.
    """
    compared = {rank: theirs for rank, theirs in enumerate(everyone) if theirs is not None}
    for other, theirs in compared.items():
        first, ours = next(iter(compared.items()))
        names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
        if names:
            lacks = [
                f" (rank {rank} has no such parameter)" for rank in (first, other) if names[0] not in compared[rank]
            ]
            return (
                f"parameter {names[0]} is not the same on rank {first} and rank {other}{''.join(lacks)}; "
                f"{len(names)} of {len({**ours, **theirs})} parameters differ. {_CAUSES}"
            )
    return ""


def numbers(named: Named) -> dict[str, int]:
    """A checksum of each parameter."""
    return {name: _number(parameter) for name, parameter in named}


@torch.inference_mode(False)  # in which nobody may look at a DTensor's part
@torch.no_grad()
def _number(values: torch.Tensor) -> int:
    """A checksum of shape, dtype and all bits of the values."""
    if is_lazy(values) or values.is_meta:  # has no values yet
        return 0
    values = values.detach()
    number = zlib.crc32(f"{tuple(values.shape)} {values.dtype}".encode())
    if hasattr(values, "to_local"):  # a DTensor: this rank's part
        values = values.to_local()
    if values.layout is not torch.strided:
        values = values.to_dense()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    for part in values.reshape(-1).split(_PART):
        number = zlib.crc32(part.cpu().view(torch.uint8).numpy(), number)
    return number
