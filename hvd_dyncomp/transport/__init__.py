"""Transports send the bytes: `base` has the contract; `horovod`, `torch_distributed` and `in_process` fulfil it."""

from __future__ import annotations

import sys
from typing import Any

import torch

from hvd_dyncomp.checks import shown
from hvd_dyncomp.transport.base import Transport


def given_or_horovod(transport: Any) -> Transport:
    """`transport`, or Horovod's among all ranks if it is None.

    Only then is Horovod imported. It may be initialized later.

    Raises:
        TypeError: `transport` is neither a `Transport` nor None.
        HorovodMissing: Horovod is needed and missing.
    """
    if transport is None:
        from hvd_dyncomp.transport.horovod import HorovodTransport

        return HorovodTransport()
    return given(transport)


def given_or_initialized(transport: Any) -> Transport:
    """`transport`; if it is None, Horovod's where it is initialized, or else that of torch's default process group.

    Raises:
        TypeError: `transport` is neither a `Transport` nor None.
        ValueError: neither is initialized.
    """
    if transport is not None:
        return given(transport)
    horovod = sys.modules.get("horovod.torch")
    if horovod is not None and horovod.is_initialized():
        return given_or_horovod(None)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        from hvd_dyncomp.transport import torch_distributed

        return torch_distributed.transport()
    raise ValueError(
        "nothing connects the ranks: call hvd.init(), or torch.distributed.init_process_group(), or pass transport="
    )


def given(transport: Any) -> Transport:
    """`transport`, checked.

    Raises:
        TypeError: it is no `Transport`.
    """
    if not isinstance(transport, Transport):
        raise TypeError(f"transport must be a Transport, got {shown(transport)}")
    return transport
