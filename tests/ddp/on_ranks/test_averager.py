"""`Averager` over a process group, without DistributedDataParallel."""

import pytest
import torch
import torch.distributed as dist
from problem import Linear, assert_means, same_on_all_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from hvd_dyncomp import Averager, Controller, LockstepError, ddp

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
    assert sent.steps == 3 and (sent.saved_fraction > 0) == (bits < 32 or dtype is torch.bfloat16)


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


def alike(value: float) -> Linear:
    module = Linear()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += value
    return module


@pytest.mark.promise("If ranks create averagers of different models, every rank raises an error.")
def test_another_order_on_another_rank(rank, size):
    """As from a set: two models of one architecture would be averaged with each other."""
    models, odd = [alike(1), alike(2)], rank == size - 1
    text = rf"different Averagers: parameter values.0 has different values on rank 0 and on rank {size - 1}; create"
    for one in reversed(models) if odd else models:
        with pytest.raises(LockstepError, match=text):
            Averager(one.named_parameters(), 4)
    # Values that are to differ are not compared; names and shapes are.
    controller = Controller(16, check_replicas=False)
    averager = Averager(models[odd].named_parameters(), controller, **SHAPE)
    tensors = models[0].noise(0, rank)
    averager.mean_(tensors)
    assert_means(tensors, models[0].mean(0), 16)
    with pytest.raises(LockstepError, match="parameter number . is a .torch.float32, shape .3000.. on rank 0"):
        Averager([("b" if odd else "a", torch.zeros(3000))], controller)


@pytest.mark.promise("If ranks create averagers of different models, every rank raises an error.")
def test_an_argument_that_is_wrong_on_one_rank(rank, size):
    kind, text = (
        (ValueError, "^block_size") if rank == 0 else (LockstepError, "^rank 0 cannot make its Averager: Value")
    )
    with pytest.raises(kind, match=text):
        Averager([("a", torch.zeros(3000))], 4, block_size=100 if rank == 0 else 64)
    averager = Averager([("a", torch.zeros(3000))], 16)
    tensor = torch.full((3000,), float(rank))
    averager.mean_([tensor])
    torch.testing.assert_close(tensor, torch.full((3000,), (size - 1) / 2), rtol=2**-15, atol=0)


def test_in_a_group_of_its_own(rank):
    group = dist.new_group([1, 0])
    if rank < 2:
        averager = Averager([("a", torch.zeros(3000))], 16, transport=ddp.transport(group))
        tensor = torch.full((3000,), float(rank))
        averager.mean_([tensor])
        torch.testing.assert_close(tensor, torch.full((3000,), 0.5))
    dist.barrier()
