"""Rank 0 calls `Controller.step` once more than the others, whose programs are over. A job of its own."""

from __future__ import annotations

import pytest
from horovod.common.exceptions import HorovodInternalError

from hvd_dyncomp import Controller, Static

pytestmark = pytest.mark.timeout(60, method="thread")


def test_it_ends(rank):
    controller = Controller(Static(4))
    controller.step({"accuracy": 0.5})
    if rank == 0:
        with pytest.raises(HorovodInternalError, match="shut down|finished|terminated|closed"):
            controller.step({"accuracy": 0.5})
