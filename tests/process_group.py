"""Fixtures of checks that run on every rank under torchrun; rank-dependent is only what they make so."""

import os
import socket
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist


@pytest.fixture(autouse=True, scope="session")
def process_group() -> Iterator[None]:
    # Not at import: pytest may import this file when it collects the whole tree, in a process that is no rank.
    assert sys.modules["horovod"] is None
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with pytest.MonkeyPatch.context() as patch:
        if per_host := int(os.environ.get("HVD_DYNCOMP_TEST_RANKS_PER_HOST", 0)):
            host = f"host{dist.get_rank() // per_host}"
            patch.setattr(socket, "gethostname", lambda: host)
            patch.setenv("LOCAL_WORLD_SIZE", str(per_host))
        yield
    dist.destroy_process_group()


@pytest.fixture
def rank() -> int:
    return dist.get_rank()


@pytest.fixture
def size() -> int:
    return dist.get_world_size()
