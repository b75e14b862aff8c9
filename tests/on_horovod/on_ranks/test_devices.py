"""A GPU makes of gradients what a CPU does, bit for bit, in whatever stream the program trains.

Never run on a GPU: without one for every rank it is skipped.
"""

import horovod.torch as hvd
import pytest
import torch
from problem import Problem, ours

from hvd_dyncomp.transport.horovod import HorovodTransport

CASES = {
    "a quarter of a bit": (0.25, {}),
    "four bits": (4, {}),
    "two bits": (2, {}),
    "one bit": (1, {}),
    "skipped ones": (8, {"skip": lambda name, parameter: name == "odd"}),
}


@pytest.fixture
def gpu() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    if obstacle := HorovodTransport().unsupported_reason(torch.device("cuda")):
        pytest.skip(obstacle)
    count = torch.cuda.device_count()
    if hvd.nccl_built() and count < hvd.local_size():
        pytest.skip(f"NCCL wants a GPU for each rank, and there are {count}")
    return torch.device("cuda", hvd.local_rank() % count)


def reduced(device: torch.device, case: str, dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    """The gradients of some steps."""
    bits, arguments = CASES[case]
    problem = Problem(device=device, dtype=dtype, compression=ours(bits, **arguments)())
    return [
        {name: gradient.cpu() for name, gradient in problem.reduce(problem.draw(seed)).items()} for seed in range(10)
    ]


def assert_like_a_cpu(found: list[dict[str, torch.Tensor]], case: str, dtype: torch.dtype) -> None:
    for mine, theirs in zip(found, reduced(torch.device("cpu"), case, dtype), strict=True):
        for name, gradient in theirs.items():
            if name == "odd" and "skipped" in case:  # Horovod's own sum of more than two has an order of its own
                torch.testing.assert_close(mine[name], gradient)
            else:
                assert torch.equal(mine[name], gradient), name


def test_a_cpu_does_twice_the_same():
    case = "skipped ones"
    assert_like_a_cpu(reduced(torch.device("cpu"), case, torch.float32), case, torch.float32)


@pytest.mark.parametrize("stream", ["the default stream", "a stream of its own"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_a_gpu_does_the_same(gpu, case, dtype, stream):
    own = "own" in stream
    with torch.cuda.device(gpu), torch.cuda.stream(torch.cuda.Stream(gpu) if own else None):
        found = reduced(gpu, case, dtype)
    assert_like_a_cpu(found, case, dtype)
