"""A GPU makes of gradients what a CPU does, bit for bit. Never run on a GPU: without one that part is skipped.

Two ranks may share a GPU, since the process group's backend is Gloo.
"""

import random
import threading
import time
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from problem import Linear, distributed, gradients
from torch import Tensor

from hvd_dyncomp import ddp
from hvd_dyncomp.transport import staging
from hvd_dyncomp.transport.torch_distributed import ProcessGroupTransport

CASES = {
    "a quarter of a bit": (0.25, {}),
    "one bit": (1, {}),
    "four bits": (4, {}),
    "stochastic": (2, {"rounding": "stochastic"}),
    "without error feedback": (8, {"error_feedback": False}),
    "uncompressed": (32, {}),
    "one skipped": (8, {"skip": lambda name, parameter: name == "values.1"}),
    "half": (8, {"skip": lambda name, parameter: name == "values.1", "fp16_skipped": True}),
}
STEPS = 4


def trained(case: str, device: torch.device, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The gradients of some steps, and the residuals after them, in main memory."""
    bits, arguments = CASES[case]
    model, quantizer = distributed(bits, module=Linear(dtype=dtype).to(device), **arguments)
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


class Copies:
    """Has all messages treated as a GPU's whose copies are complete some time later, each stream's in their order."""

    def __init__(self, monkeypatch) -> None:
        self.threads: set[str] = set()
        here, copies = threading.local(), self

        class Event:
            def __init__(self, blocking: bool) -> None:
                assert blocking

            def record(self, stream: str) -> None:
                self._seconds = random.random() / 100

            def synchronize(self) -> None:
                copies.threads.add(threading.current_thread().name)
                time.sleep(self._seconds)

        def current_stream(device: torch.device) -> str:
            here.number = getattr(here, "number", 0) + 1
            return "even" if here.number % 2 else "odd"

        monkeypatch.setattr(staging, "on_gpu", lambda tensor: tensor.dtype is torch.uint8)
        monkeypatch.setattr(staging, "pinned", lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
        monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)


@pytest.mark.parametrize("case", CASES)
def test_messages_that_are_copied_late_change_nothing(monkeypatch, case):
    expected = trained(case, torch.device("cpu"))
    with monkeypatch.context() as patch:
        copies = Copies(patch)
        assert_alike(trained(case, torch.device("cpu")), expected, True)
        dist.barrier()
        ddp.transport().close()  # the next is one without copies
    assert any(name.startswith("hvd_dyncomp.staging") for name in copies.threads)


def test_a_copy_that_fails_is_an_error_on_every_rank(monkeypatch, rank):
    """The rank whose GPU it is says why; the others are told that it is gone, when it ends."""
    transport = ProcessGroupTransport()
    with monkeypatch.context() as patch:
        Copies(patch)

        def broken(self) -> None:
            raise RuntimeError("CUDA error: unspecified launch failure")

        if rank == 0:
            patch.setattr(torch.cuda.Event, "synchronize", broken)
        handle = transport.allgather(torch.ones(3, dtype=torch.uint8), "broken")
        if rank == 0:
            with pytest.raises(RuntimeError, match="unspecified launch failure"):
                transport.wait(handle)
            transport.close()
        else:
            with pytest.raises(ConnectionError, match="rank 0 was lost"):
                transport.wait(handle)
    dist.barrier()  # or a rank that is done would be lost to one that still waits for rank 0
    transport.close()


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
