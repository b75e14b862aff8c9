"""Transports send the bytes: `base` has the contract; `horovod`, `torch_distributed` and `in_process` fulfil it."""

from __future__ import annotations

from typing import Any

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
    if not isinstance(transport, Transport):
        raise TypeError(f"transport must be a Transport, got {shown(transport)}")
    return transport
