"""Gradients that share memory: with each other, with the program, or with what backward has yet to read.

`a.view(-1) + b.view(-1)`, `torch.cat([a, b]) + torch.cat([c, d])` and the like give two parameters one gradient. A mean
that is written there too early would be read as the other parameter's gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Not documented by torch. Without it, every mean is written only when all gradients have been read.
_owners = getattr(torch._C, "_storage_Use_Count", None)
_OWN = 2  # the gradient, and the object by which it is asked


def are_sole_owners(tensors: Sequence[torch.Tensor | None]) -> bool:
    """Whether nothing else owns the tensors' memory, so that nobody can notice when it is written."""
    for tensor in tensors:
        if _owners is None or (tensor is not None and _owners(tensor.untyped_storage()._cdata) != _OWN):
            return False
    return True


def overlapping(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Numbers of tensors that share an element with one that comes before them and is not in the result."""
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + _extent(tensor), i) for i, tensor in enumerate(tensors))
    found: list[int] = []
    cluster: list[int] = []  # tensors whose spans hang together
    begin = end = 0
    for first, last, i in spans:
        if first >= end:
            found += _within(cluster, tensors, begin, end)
            cluster, begin = [], first
        cluster.append(i)
        end = max(end, last)
    return sorted(found + _within(cluster, tensors, begin, end))


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    if tensor.is_contiguous():
        return tensor.nbytes
    return (sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1) * (
        tensor.element_size()
    )


def _within(cluster: list[int], tensors: Sequence[torch.Tensor], begin: int, end: int) -> list[int]:
    """Those of a cluster that overlap an earlier one: exactly, since spans of strided tensors may interleave."""
    if len(cluster) < 2:
        return []
    taken = torch.zeros(end - begin, dtype=torch.bool, device="cpu")  # by byte
    found = []
    for i in sorted(cluster):
        tensor = tensors[i]
        size = tensor.element_size()
        steps = [step * size for step in tensor.stride()]
        place = taken.as_strided((*tensor.shape, size), (*steps, 1), tensor.data_ptr() - begin)
        if place.any():
            found.append(i)
        else:
            place.fill_(True)
    return found
