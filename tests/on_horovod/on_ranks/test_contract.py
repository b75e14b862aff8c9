"""The contract of a transport, over Horovod."""

import sys
from pathlib import Path

import pytest

from hvd_dyncomp.transport.horovod import HorovodTransport

sys.path.append(str(Path(__file__).parents[2] / "transport"))
from contract import CHECKS


@pytest.mark.parametrize("check", CHECKS)
def test_over_horovod(check):
    check(HorovodTransport())
