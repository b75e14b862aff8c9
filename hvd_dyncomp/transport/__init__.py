"""Transports send the bytes: `base` has the contract; `horovod`, `torch_distributed` and `alone` fulfil it."""

from __future__ import annotations

from typing import Any

from hvd_dyncomp.checks import shown
from hvd_dyncomp.transport.alone import Alone
from hvd_dyncomp.transport.base import Transport
from hvd_dyncomp.transport.launched import by_launcher, has_process_group, initialized_horovod, processes


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

    A process that no launcher has started beside others, and that has neither, gets one of a single rank.

    Raises:
        TypeError: `transport` is neither a `Transport` nor None.
        ValueError: neither is initialized, and there are other processes.
    """
    if transport is not None:
        return given(transport)
    if initialized_horovod() is not None:
        return given_or_horovod(None)
    if has_process_group():
        from hvd_dyncomp.transport import torch_distributed

        return torch_distributed.transport()
    if processes() == 1:
        return Alone()
    said = ", ".join(name for name, size in by_launcher().items() if size > 1)
    raise ValueError(
        "nothing connects the ranks: call hvd.init(), or torch.distributed.init_process_group(), or pass transport=; "
        f"or unset {said} if each process trains alone"
    )


def given(transport: Any) -> Transport:
    """`transport`, checked.

    Raises:
        TypeError: it is no `Transport`.
    """
    if not isinstance(transport, Transport):
        raise TypeError(f"transport must be a Transport, got {shown(transport)}")
    return transport
