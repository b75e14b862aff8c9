"""Which gradients are compressed, and what arrives where codes of few bits would not be harmless."""

import horovod.torch as hvd
import pytest
import torch
from simulated import WORLDS, RecordingWorld, Worker, mean_of, noise, on_ranks

from hvd_dyncomp.simulate import InProcessTransport


@WORLDS
@pytest.mark.parametrize("where", ["everywhere", "on rank 0"])
def test_a_step_in_inference_mode_is_an_error_in_words(ranks, hosts, where):
    """The same step outside of it works."""

    def program(worker: Worker) -> dict[str, torch.Tensor]:
        worker.step(worker.noise(0))
        worker.backward(worker.noise(1))
        if where == "everywhere" or worker.transport.rank == 0:
            with torch.inference_mode(), pytest.raises(RuntimeError, match=r"outside of torch\.inference_mode"):
                worker.optimizer.step()
        worker.optimizer.step()
        return {name: p.grad.clone() for name, p in worker.parameters.items()}

    seen, _ = on_ranks(ranks, program, {"a": 650, "b": 200, "small": 5}, 16, hosts=hosts)
    for name, gradient in seen[0].items():
        assert all(torch.equal(other[name], gradient) for other in seen)


@pytest.mark.promise("Parameter values whose gradients are zero do not change; at 1 bit they change a little.")
@WORLDS
@pytest.mark.parametrize("bits", [4, 3, 2, 1, 0.5, 0.25, 0.125])
def test_values_whose_gradient_is_always_zero(ranks, hosts, bits):
    """As unused rows of an embedding among used ones. One bit has no code for zero and moves them, in bounds."""

    def program(worker: Worker) -> tuple[torch.Tensor, float]:
        largest = 0.0
        for step in range(30):
            gradients = worker.noise(step)
            gradients["rows"].view(-1, 16)[::3] = 0
            worker.step(gradients)
            largest = max(largest, float(worker.parameters["rows"].detach().view(-1, 16)[::3].abs().max()))
        return worker.parameters["rows"].detach().view(-1, 16), largest

    seen, _ = on_ranks(ranks, program, {"rows": 16 * 120}, bits, hosts=hosts)
    for rows, largest in seen:
        assert rows[1].any()
        if bits == 1:
            assert 0 < largest < 4  # the gradients' standard deviation is 1 on each rank
        else:
            assert largest == 0


@WORLDS
def test_one_value_that_a_program_has_written_arrives(ranks, hosts):
    """In a gradient that no backward has made, zeros otherwise."""

    def program(worker: Worker):
        worker.backward({"b": worker.noise(0)["b"]})
        worker.parameters["a"].grad = torch.zeros(640)
        worker.parameters["a"].grad[-1] = 3.0 * (worker.transport.rank == 1)
        worker.optimizer.step()
        return worker.parameters["a"].grad

    results, _ = on_ranks(ranks, program, {"a": 640, "b": 40}, 16, hosts=hosts)
    for got in results:
        torch.testing.assert_close(got, torch.tensor([0.0] * 639 + [3.0 / ranks]), rtol=1e-3, atol=0)


@pytest.mark.promise("Means of finite float16 gradients are finite; below 32 bits, sums of them are refused.")
@WORLDS
@pytest.mark.parametrize("bits", [0.25, 1, 2, 3, 4, 5, 8, 16])
def test_means_of_finite_float16_values_are_finite(ranks, hosts, bits):
    """Codes may stand for more than the largest value, and what waits comes on top."""

    def program(worker: Worker):
        p = worker.parameters["a"]
        p.data, finite = p.data.half(), True
        for _ in range(4):
            gradient = torch.full((640,), 65_504.0)
            gradient[::2] *= 0.9
            worker.optimizer.zero_grad()
            worker.backward({"a": gradient.half()})
            worker.optimizer.step()
            finite = finite and p.grad.isfinite().all() and p.grad.any()
        return p.grad.dtype, finite

    results, _ = on_ranks(ranks, program, {"a": 640}, bits, hosts=hosts)
    assert all(dtype is torch.float16 and finite for dtype, finite in results)


@pytest.mark.promise("Means of finite float16 gradients are finite; below 32 bits, sums of them are refused.")
@WORLDS
@pytest.mark.parametrize(("dtype", "bits"), [(torch.float16, 4), (torch.float16, 32), (torch.bfloat16, 4)])
def test_float16_sums_are_refused_below_32_bits(ranks, hosts, dtype, bits):
    """On every rank, before anything is sent."""

    def program(worker: Worker):
        p = worker.parameters["a"]
        p.data = p.data.to(dtype)
        gradient = worker.noise(0)["a"].to(dtype)
        if dtype is not torch.float16 or bits == 32:
            worker.backward({"a": gradient})
            worker.optimizer.step()
            return p.grad.isfinite().all()
        with pytest.raises(ValueError, match=r"^op must be hvd\.Average to compress float16 .*, got hvd\.Sum for a: "):
            worker.backward({"a": gradient})
            worker.optimizer.step()
        return worker.quantizer.meter.total().sent_bytes == 0

    results, _ = on_ranks(ranks, program, {"a": 640}, bits, op=hvd.Sum, hosts=hosts, attach=False)
    assert all(results)


@WORLDS
@pytest.mark.parametrize("bits", [0.125, 0.25, 0.5, 1, 2, 3, 4, 5, 8, 16])
def test_sums_of_huge_values_are_finite(ranks, hosts, bits):
    """A code may stand for more than twice the largest value of its block; below one bit values wait for many steps."""
    value = (7e37 if bits >= 1 else 7e36) / ranks

    def program(worker: Worker):
        return [worker.step({"a": torch.full((640,), value)})["a"] for _ in range(8)]

    results, _ = on_ranks(ranks, program, {"a": 640}, bits, hosts=hosts)
    assert all(got.isfinite().all() and got.any() for each in results for got in each)


@WORLDS
@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize("takes", [True, False])
def test_bfloat16_and_strides_come_back_as_they_were(ranks, hosts, bits, takes, monkeypatch):
    """Horovod cannot reduce bfloat16: it gets float32."""
    monkeypatch.setattr(InProcessTransport, "takes", lambda self, dtype: takes or dtype is not torch.bfloat16)

    def program(worker: Worker):
        p = worker.parameters["a"]
        p.data = torch.zeros(20, 32, dtype=torch.bfloat16).t()
        worker.backward({"a": noise("a", 640, worker.transport.rank, 0).view(32, 20).bfloat16()})
        worker.optimizer.step()
        assert p.grad.dtype is torch.bfloat16
        return p.grad.float().flatten()

    results, world = on_ranks(ranks, program, {"a": 640}, bits, hosts=hosts)
    expected = sum(noise("a", 640, rank, 0) for rank in range(ranks)) / ranks
    for got in results:
        assert (got - expected).norm() <= 0.02 * expected.norm()
    travels = [torch.bfloat16 if takes else torch.float32] * ranks if bits == 32 else []
    assert [sent.tensor.dtype for sent in world.sent if sent.name == "allreduce.a"] == travels


def test_complex_and_skipped_parameters_travel_as_they_are():
    sizes = {"a": 130, "skipped": 140, "small": 5, "complex": 150}

    def program(transport):
        own = {"skip": lambda name, p: name == "skipped" and p.shape == (140,), "attach": False}
        worker = Worker(transport, sizes, 1, **own)
        worker.parameters["complex"].data = torch.zeros(150, dtype=torch.complex64)
        worker.quantizer.attach(worker.optimizer)
        gradients = {**worker.noise(0), "complex": torch.full((150,), 1 + 2j)}
        return worker.step(gradients)

    world = RecordingWorld(2)
    results = world.run(program)
    expected = (noise("skipped", 140, 0, 0) + noise("skipped", 140, 1, 0)) / 2
    torch.testing.assert_close(results[0]["skipped"], expected)
    assert torch.equal(results[0]["complex"], torch.full((150,), 1 + 2j))
    lengths = {sent.name: sent.tensor.numel() for sent in world.sent if sent.name.startswith("allreduce")}
    assert lengths == {"allreduce.skipped": 140, "allreduce.complex": 150}


@WORLDS
@pytest.mark.parametrize("bits", [0.125, 1, 8, 16])
def test_what_is_small_has_eight_bits_at_least(ranks, hosts, bits):
    sizes = {"a": 128, "small": 5, "tiny": 1}

    def program(worker: Worker):
        return worker.step(worker.noise(0))

    results, _ = on_ranks(ranks, program, sizes, bits, hosts=hosts)
    for name in ("small", "tiny"):
        expected = sum(noise(name, sizes[name], rank, 0) for rank in range(ranks)) / ranks
        for got in results:
            # Half a step of each of two quantizations, or of a mantissa of 8 bits within a host.
            assert (got[name] - expected).abs().max() <= 4 / 127


def test_what_is_skipped_travels_as_it_is():
    def program(worker: Worker):
        return worker.step(worker.noise(0))["skipped"]

    results, world = on_ranks(2, program, {"a": 130, "skipped": 5}, 4, skip=lambda name, _: name == "skipped")
    [sent, _] = [sent.tensor for sent in world.sent if sent.name == "allreduce.skipped"]
    assert sent.dtype is torch.float32
    expected = (noise("skipped", 5, 0, 0) + noise("skipped", 5, 1, 0)) / 2
    assert results[0].dtype is torch.float32
    torch.testing.assert_close(results[0], expected, rtol=1e-6, atol=1e-6)


def test_a_group_of_one_rank_has_nobody_to_compress_for():
    def program(worker: Worker):
        return worker.step(worker.noise(0))["a"]

    results, world = on_ranks(1, program, {"a": 130}, 1)
    assert torch.equal(results[0], noise("a", 130, 0, 0))
    assert {sent.kind for sent in world.sent} == {"sum"}


@WORLDS
def test_a_parameter_that_horovod_does_not_reduce_is_none_of_ours(ranks, hosts):
    """A group that was added later: its parameters have neither a hook nor a name."""

    def program(worker: Worker):
        worker.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(500))]})
        return worker.step(worker.noise(0))["a"]

    results, _ = on_ranks(ranks, program, {"a": 130}, 16, hosts=hosts)
    expected = sum(noise("a", 130, rank, 0) for rank in range(ranks)) / ranks
    assert all((got - expected).norm() <= 2e-3 * expected.norm() for got in results)


def test_gradients_in_a_buffer_of_the_users_stay_there():
    """Filled by backward, or assigned: means are found where the program looks for them."""

    def program(worker: Worker) -> torch.Tensor:
        [parameter] = worker.parameters.values()
        flat = torch.zeros(640)
        parameter.grad = flat.view(-1)
        worker.optimizer.backward(parameter, noise("a", 640, worker.transport.rank, 0))
        worker.optimizer.step()
        assert torch.equal(flat, parameter.grad)
        assigned = noise("a", 640, worker.transport.rank, 1)
        parameter.grad = assigned.view(-1)
        worker.optimizer.step()
        return assigned

    seen, _ = on_ranks(2, program, {"a": 640}, 16)
    for gradient in seen:
        torch.testing.assert_close(gradient, mean_of("a", 640, 1, range(2), 2), rtol=0, atol=2e-4)
