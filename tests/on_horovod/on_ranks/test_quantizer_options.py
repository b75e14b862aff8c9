"""What a user can choose about which gradients are compressed, and how the others travel."""

import horovod.torch as hvd
import pytest
import torch
from problem import DEVICE, Problem, same_on_all_ranks

from hvd_dyncomp import Controller, DynamicQuantizer, LockstepError, Static, without_momentum


def reduced(request, names=("long", "odd", "bias"), steps=1, **arguments):
    """The quantizer, the last step's means and the exact ones."""
    quantizer = DynamicQuantizer(Controller(Static(4)), **arguments)
    problem = Problem(names=list(names), prefix=f"{request.node.name}.", compression=quantizer)
    for step in range(steps):
        wanted = problem.draw(seed=step)
        got = problem.reduce(wanted)
    exact = {name: hvd.allreduce(wanted[name].double(), name=f"exact.{name}") for name in wanted}
    assert same_on_all_ranks(got.values(), "got")
    return quantizer, got, exact


def error(got, exact):
    return ((got.double() - exact).norm() / exact.norm()).item()


def test_what_is_skipped_arrives_exactly(request):
    skip = lambda name, parameter: name.endswith("odd") and parameter.numel() == 1031  # noqa: E731
    quantizer, got, exact = reduced(request, skip=skip)
    assert error(got["odd"], exact["odd"]) < 1e-6 < 1e-2 < error(got["long"], exact["long"])
    assert quantizer.meter.total().compressed_values == 5010


def test_a_parameter_that_one_rank_skips(request, rank):
    with pytest.raises(
        LockstepError, match=r"odd has shape \(1031,\) on rank 0, \(1031,\) \(not compressed\) on rank 1"
    ):
        reduced(request, skip=lambda name, parameter: rank == 1 and name.endswith("odd"))


def test_a_skip_that_fails_on_one_rank(request, rank):
    def skip(name, parameter):
        return rank == 1 and {}[name]

    expected = (KeyError, "long|odd|bias") if rank == 1 else (LockstepError, "rank 1 cannot use its quantizer")
    with pytest.raises(expected[0], match=expected[1]):
        reduced(request, skip=skip)


def test_skipped_tensors_as_float16(request, size):
    """Half the bytes, and the precision of float16; what is compressed is the same."""
    skip = lambda name, _: name.endswith("odd")  # noqa: E731
    full, exact = reduced(request, steps=2, skip=skip)[::2]
    half, got, _ = reduced(request, steps=2, skip=skip, fp16_skipped=True)
    assert 0 < error(got["odd"], exact["odd"]) < 1e-3
    saved = full.meter.total().uncompressed_bytes - half.meter.total().uncompressed_bytes
    assert saved == pytest.approx(2 * 2 * 1031 * 2 * (size - 1) / size)
    assert full.meter.total().compressed_bytes == half.meter.total().compressed_bytes


def test_attached_before_the_first_gradient(request):
    quantizer = DynamicQuantizer(Controller(Static(16)))
    problem = Problem(names=["long", "bias"], prefix=f"{request.node.name}.", compression=quantizer)
    quantizer.attach(problem.optimizer)
    assert quantizer.state_dict()["world_size"] == hvd.size(), "it knows its optimizer"
    for step in range(2):
        wanted = problem.draw(seed=step)
        got = problem.reduce(wanted)
        exact = hvd.allreduce(wanted["long"].double(), name=f"exact.{step}")
        assert error(got["long"], exact) < 1e-3
    # Again in mid-run: what it owes goes over.
    before = quantizer.state_dict()["residuals"]
    quantizer.attach(problem.optimizer)
    after = quantizer.state_dict()["residuals"]
    assert before[f"{request.node.name}.long"].any()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(("bits", "factor"), [(0.25, 4), (2, 4), (4, 1), (32, 1)])
def test_momentum_is_left_out_at_few_bits(bits, factor, request, rank):
    """SGD steps by 1 / (1 - m) times what was reduced and clipped; also where a rank has no batch, by turns."""
    values = torch.nn.Parameter(torch.zeros(3000, device=DEVICE))
    optimizer = hvd.DistributedOptimizer(
        without_momentum(torch.optim.SGD([values], lr=0.5, momentum=0.75)),
        named_parameters=[(request.node.name, values)],
        compression=DynamicQuantizer(Controller(Static(bits))),
    )
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1)
    for step in range(4):
        before = values.detach().clone()
        optimizer.zero_grad()
        if (step + rank) % 2:
            noise = torch.randn(3000, generator=torch.Generator().manual_seed(10 * rank + step))
            (values * noise.to(DEVICE)).sum().backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_([values], 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
        scheduler.step()
        moved = before - values.detach()
        if factor > 1 or step == 0:
            torch.testing.assert_close(moved, 0.5 * factor * values.grad, rtol=1e-4, atol=1e-6)
        else:
            assert not torch.allclose(moved, 0.5 * values.grad, rtol=1e-2, atol=1e-3), "momentum moves it as well"
        assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]) == (0.5, 0.75)
    assert same_on_all_ranks([values], f"values.{request.node.name}")
