"""One machine that passes for several hosts, as far as the library can see."""

from __future__ import annotations

import os
from collections.abc import Sequence

import horovod.torch as hvd
import pytest

from hvd_dyncomp.transport.horovod import HorovodTransport

VARIABLE = "HVD_DYNCOMP_TEST_HOSTS"  # how many hosts all checks of a process are to see


def place(patch: pytest.MonkeyPatch, hosts: Sequence[int] | None = None) -> None:
    """Has every rank say that it is on a host, until `patch` is undone.

    Args:
        hosts: the number of each one's host, by Horovod's rank; None: as the environment says.
    """

    def placed() -> list[int]:
        return _by_environment() if hosts is None else list(hosts)

    patch.setattr(HorovodTransport, "host", property(lambda self: f"host{placed()[hvd.rank()]}"))
    patch.setattr(HorovodTransport, "local_size", property(lambda self: placed().count(placed()[hvd.rank()])))


def two_levels() -> bool:
    """Whether all checks run on pretended hosts of several workers, and so gradients travel within hosts first."""
    hosts = _by_environment()
    return len(set(map(hosts.count, hosts))) == 1 and 1 < len(set(hosts)) < len(hosts)


def _by_environment() -> list[int]:
    """Consecutive ranks on each host, and as many on one as on another, if that can be."""
    hosts = int(os.environ.get(VARIABLE, "1"))
    return [rank * hosts // hvd.size() for rank in range(hvd.size())]
