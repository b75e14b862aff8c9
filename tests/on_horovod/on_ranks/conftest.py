"""The checks run on every rank; rank-dependent is only what they make so."""

import os
from collections.abc import Iterator

import horovod.torch as hvd
import pytest
import torch
from placement import VARIABLE, place


@pytest.fixture(autouse=True, scope="session")
def horovod() -> Iterator[None]:
    # Not at import: pytest may import this file when it collects the whole tree, in a process that is no rank.
    os.environ["HOROVOD_TIMELINE"] = "DYNAMIC"  # so that a check may see what travels
    hvd.init()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        if VARIABLE in os.environ:
            place(patch)
        yield


@pytest.fixture
def rank() -> int:
    return hvd.rank()


@pytest.fixture
def size() -> int:
    return hvd.size()
