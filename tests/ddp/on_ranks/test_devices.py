"""A GPU makes of gradients what a CPU does, bit for bit. Never run on a GPU: without one that part is skipped.

Two ranks may share a GPU where the backend is Gloo. NCCL takes one rank a GPU: each rank is alone in a group, and all
of them are in one where there are enough GPUs. HVD_DYNCOMP_TEST_DEVICE=cpu rehearses that with Gloo.
"""

import os
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from problem import Linear, distributed, gradients
from torch import Tensor

from hvd_dyncomp.transport import phase_groups
from hvd_dyncomp.transport.phase_groups import Groups
from hvd_dyncomp.transport.torch_distributed import ProcessGroupTransport

CASES = {
    "a quarter of a bit": (0.25, {}),
    "one bit": (1, {}),
    "four bits": (4, {}),
    "two bits": (2, {}),
    "without error feedback": (8, {"error_feedback": False}),
    "uncompressed": (32, {}),
    "one skipped": (8, {"skip": lambda name, parameter: name == "values.1"}),
}
STEPS = 4


def trained(case: str, device: torch.device, dtype: torch.dtype = torch.float32, group=None) -> list[Tensor]:
    """The gradients of some steps, and the residuals after them, in main memory."""
    bits, arguments = CASES[case]
    module = Linear(dtype=dtype).to(device)
    model, quantizer = distributed(bits, module=module, ddp_arguments={"process_group": group}, **arguments)
    found = []
    for seed in range(STEPS):
        model.zero_grad()
        loss = model(seed)
        loss.backward()
        found += [gradient.cpu() for gradient in gradients(model)]
        with torch.no_grad():  # queued after what writes the means
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    found += [parameter.detach().cpu() for parameter in model.parameters()]
    return found + [residual.cpu() for residual in quantizer.state_dict()["residuals"].values()]


def assert_alike(found: list[Tensor], expected: list[Tensor], exactly: bool) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        if exactly:
            assert torch.equal(mine, theirs)
        else:  # torch's own sum of more than two ranks has an order of its own
            torch.testing.assert_close(mine, theirs)


@pytest.fixture
def gpu(rank) -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    return torch.device("cuda", rank % torch.cuda.device_count())


@pytest.mark.parametrize("stream", ["the default stream", "a stream of its own"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_a_gpu_does_what_a_cpu_does(gpu, case, dtype, stream, size):
    with torch.cuda.device(gpu), torch.cuda.stream(torch.cuda.Stream(gpu) if "own" in stream else None):
        found = trained(case, gpu, dtype)
    exactly = size == 2 or CASES[case][0] < 32 and "skip" not in CASES[case][1]
    assert_alike(found, trained(case, torch.device("cpu"), dtype), exactly)


@pytest.fixture(scope="module", params=["each rank alone", "all ranks"])
def groups(request) -> tuple[torch.device, dist.ProcessGroup, dist.ProcessGroup]:
    """A GPU, a group over NCCL, and one over Gloo of the same ranks."""
    rank, size, gpus = dist.get_rank(), dist.get_world_size(), torch.cuda.device_count()
    pretended = os.environ.get("HVD_DYNCOMP_TEST_DEVICE") == "cpu"
    alone = request.param == "each rank alone"
    if not pretended and gpus < (1 if alone else size):
        pytest.skip(f"torch sees {gpus} GPUs")
    made = []
    for backend in ("gloo" if pretended else "nccl", "gloo"):
        all_of_them = [dist.new_group([one], backend=backend) for one in range(size)] if alone else []
        made.append(all_of_them[rank] if alone else dist.new_group(backend=backend))
    return torch.device("cpu") if pretended else torch.device("cuda", rank % gpus), made[0], made[1]


def on(device: torch.device) -> AbstractContextManager:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@pytest.mark.parametrize("case", ["a quarter of a bit", "four bits", "uncompressed", "half"])
def test_nccl_does_what_gloo_does(groups, case):
    device, nccl, gloo = groups
    with on(device):
        found = trained(case, device, group=nccl)
    exactly = dist.get_world_size(gloo) <= 2 or CASES[case][0] < 8
    assert_alike(found, trained(case, torch.device("cpu"), group=gloo), exactly)


def test_messages_and_sums_by_nccl(groups):
    """Of other lengths for each rank. What is sent is let go of at once, in a stream that uses its memory anew."""
    device, nccl, _ = groups
    rank, size = dist.get_rank(nccl), dist.get_world_size(nccl)
    ranks = tuple(range(size))
    with on(device):
        phases = {"scatter": ranks, "gather": ranks}
        name = f"test.{dist.get_process_group_ranks(nccl)}"
        transport = ProcessGroupTransport(nccl, phases, name)

        def full(length: int, value: int) -> Tensor:
            return torch.full((length,), value, dtype=torch.uint8, device=device)

        for thing in ("a", "b", "c"):
            arriving = [100_000 * (one + 1) * (rank + 1) for one in ranks]
            splits = [100_000 * (rank + 1) * (one + 1) for one in ranks]
            handle = transport.alltoall(full(sum(splits), rank), ranks, splits, arriving, f"{thing}.scatter")
            full(sum(splits), 99)
            assert transport.poll(handle) or device.type == "cpu"
            received = transport.wait(handle)
            assert torch.equal(received, torch.cat([full(length, one) for one, length in enumerate(arriving)]))
            lengths = [1000 * (one + 1) for one in ranks]
            handle = transport.allgather(full(lengths[rank], rank), f"{thing}.gather", lengths)
            gathered = transport.wait(handle)
            assert torch.equal(gathered, torch.cat([full(length, one) for one, length in enumerate(lengths)]))
            total = full(1000, rank + 1).float()
            transport.wait(transport.sum(total, "total.uncompressed"))
            assert torch.equal(total, torch.full_like(total, sum(ranks) + size))


class PretendedNccl:
    Options = SimpleNamespace

    def __init__(self, *args) -> None:
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True


def test_what_is_made_with_nccl(monkeypatch, size):
    """One communicator for all phases of the same ranks. CPUs travel by Gloo, in a group of each phase."""
    monkeypatch.setattr(dist, "ProcessGroupNCCL", PretendedNccl, raising=False)
    groups = Groups(dist.group.WORLD, "test.groups")
    groups.nccl = True
    made = groups.by_phase(dict.fromkeys(["scatter", "gather"], range(size)))
    scatter, gather = made["scatter"], made["gather"]
    assert scatter.nccl is gather.nccl is groups.among(range(size), "sums", gpus=True).nccl is not None
    assert groups.among(range(size), "all").nccl is None
    assert not set(map(id, scatter.groups)) & set(map(id, gather.groups))
    total = torch.ones(3)
    scatter.sum(total).wait()
    assert torch.equal(total, torch.full((3,), float(size)))
    phase_groups.close(groups.made, quiet=True)
    assert not scatter.nccl.aborted, "other ranks may still need what is queued on this rank's GPU"
    phase_groups.close_at_exit(0)
    assert scatter.nccl.aborted
