"""The checks run on every rank; rank-dependent is only what they make so."""

import horovod.torch as hvd
import pytest
import torch

hvd.init()
torch.set_num_threads(1)


@pytest.fixture
def rank() -> int:
    return hvd.rank()


@pytest.fixture
def size() -> int:
    return hvd.size()
