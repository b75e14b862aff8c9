"""Fixtures of checks that run on every rank under torchrun; rank-dependent is only what they make so.

HVD_DYNCOMP_TEST_DEVICE=cuda puts models on GPUs, which ranks may share. HVD_DYNCOMP_TEST_BACKEND is the process group's
for them: nccl, or else gloo. "as-nccl" is Gloo on CPUs with the rules of NCCL (as_nccl.py).
"""

import os
import socket
import sys
import tempfile
from collections.abc import Iterator

import as_nccl
import pytest
import torch
import torch.distributed as dist

DEVICE = os.environ.get("HVD_DYNCOMP_TEST_DEVICE", "cpu")
BACKEND = os.environ.get("HVD_DYNCOMP_TEST_BACKEND", "gloo")


@pytest.fixture(autouse=True, scope="session")
def process_group() -> Iterator[None]:
    # Not at import: pytest may import this file when it collects the whole tree, in a process that is no rank.
    assert sys.modules["horovod"] is None
    torch.set_num_threads(1)
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("cpu:gloo,cuda:nccl" if BACKEND == "nccl" else "gloo")
    with pytest.MonkeyPatch.context() as patch:
        if BACKEND == "as-nccl":
            as_nccl.install(patch)
        if per_host := int(os.environ.get("HVD_DYNCOMP_TEST_RANKS_PER_HOST", 0)):
            host = f"host{dist.get_rank() // per_host}"
            patch.setattr(socket, "gethostname", lambda: host)
            patch.setenv("LOCAL_WORLD_SIZE", str(per_host))
        yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def one_order() -> Iterator[None]:
    """All ranks start the collectives of tensors on GPUs in one order."""
    yield
    if BACKEND == "as-nccl":
        as_nccl.started.check()


@pytest.fixture
def rank() -> int:
    return dist.get_rank()


@pytest.fixture
def size() -> int:
    return dist.get_world_size()


@pytest.fixture
def folder() -> Iterator[str]:
    """One for all ranks."""
    with tempfile.TemporaryDirectory() as mine:
        names = [mine]
        dist.broadcast_object_list(names)
        yield names[0]
        dist.barrier()
