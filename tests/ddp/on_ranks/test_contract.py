"""The contract of a transport, over a process group."""

import sys
from pathlib import Path

import pytest

from hvd_dyncomp.transport.torch_distributed import ProcessGroupTransport

sys.path.append(str(Path(__file__).parents[2] / "transport"))
from contract import CHECKS


@pytest.fixture(scope="module")
def transport():
    return ProcessGroupTransport()


@pytest.mark.parametrize("check", CHECKS)
def test_over_gloo(check, transport):
    check(transport)
