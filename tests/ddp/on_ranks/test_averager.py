"""`Averager` over a process group, without DistributedDataParallel."""

import pytest
import torch
import torch.distributed as dist
from problem import Linear, assert_means, same_on_all_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from hvd_dyncomp import Averager, ddp

SHAPE = {"block_size": 64, "bucket_bytes": 20_000}


@pytest.mark.parametrize("bits", [1, 4, 16, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_mean_is_the_expected_one_and_the_same_everywhere(bits, dtype, rank):
    model = Linear(dtype=dtype)
    averager = Averager(model.named_parameters(), bits, **SHAPE)
    for seed in range(3):
        tensors = model.noise(seed, rank)
        averager.mean_(tensors)
        assert same_on_all_ranks(tensors)
        if seed == 0 and dtype is torch.float32:
            assert_means(tensors, model.mean(seed), bits)
    sent = averager.meter.total()
    assert sent.steps == 3 and (sent.compressed_bytes > 0) == (bits < 32)


@pytest.mark.parametrize("bits", [4, 32])
def test_a_dtype_that_gloo_cannot_add(bits, rank, size):
    averager = Averager([("a", torch.zeros(3000))], bits)
    tensor = torch.full((3000,), float(rank)).to(torch.float8_e5m2)
    averager.mean_([tensor])
    torch.testing.assert_close(tensor.float(), torch.full((3000,), (size - 1) / 2), rtol=0.25, atol=0)


def test_a_distributed_tensor_is_refused(size):
    """It has no memory of its own to write a mean to."""
    mesh = init_device_mesh("cpu", (size,))
    tensor = distribute_tensor(torch.ones(3000), mesh, [Shard(0)])
    averager = Averager([("a", torch.zeros(3000))], 4)
    with pytest.raises(TypeError, match=r"tensors\[0\] \(a\) must not be a DTensor: give tensor.to_local\(\)"):
        averager.mean_([tensor])
    averager.mean_([torch.ones(3000)])


def test_beside_a_compressed_model(rank):
    """Both work over the same transport."""
    model = torch.nn.parallel.DistributedDataParallel(Linear())
    ddp.compress(model, 16)
    averager = Averager([("x", torch.zeros(3000))], 16)
    for seed in range(2):
        model.zero_grad()
        model(seed).backward()
        tensors = model.module.noise(seed + 10, rank)[:1]
        averager.mean_([tensors[0][:3000]])
        assert_means([tensors[0][:3000]], [model.module.mean(seed + 10)[0][:3000]], 16)
        assert_means([p.grad for p in model.parameters()], model.module.mean(seed), 16)


def test_in_a_group_of_its_own(rank):
    group = dist.new_group([1, 0])
    if rank < 2:
        averager = Averager([("a", torch.zeros(3000))], 16, transport=ddp.transport(group))
        tensor = torch.full((3000,), float(rank))
        averager.mean_([tensor])
        torch.testing.assert_close(tensor, torch.full((3000,), 0.5))
    dist.barrier()
