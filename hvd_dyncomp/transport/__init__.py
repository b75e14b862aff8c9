"""Who carries the bytes: `base` has the contract; `horovod`, `torch_distributed` and `in_process` keep it."""

from __future__ import annotations

from typing import Any

from hvd_dyncomp.checks import shown
from hvd_dyncomp.transport.base import Transport


def given_or_horovod(transport: Any) -> Transport:
    """`transport`; for None Horovod's, among all workers. Horovod is imported then only, and may be initialized later.

    Raises:
        TypeError: it is neither.
        HorovodMissing: Horovod is needed and not there.
    """
    if transport is None:
        from hvd_dyncomp.transport.horovod import HorovodTransport

        return HorovodTransport()
    if not isinstance(transport, Transport):
        raise TypeError(f"transport must be a Transport, got {shown(transport)}")
    return transport
