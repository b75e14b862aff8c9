"""Which gradients are compressed, and what arrives where codes of few bits would not be harmless."""

import horovod.torch as hvd
import pytest
import torch
from simulated import WORLDS, RecordingWorld, SimulatedOptimizer, Worker, mean_of, noise, on_ranks

from hvd_dyncomp.on_horovod import session
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


@WORLDS
@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_float16_becomes_infinite_only_where_the_sum_does(ranks, hosts, op):
    """Codes of few bits overshoot; what is more than twice too large is no overshoot."""

    def program(worker: Worker):
        p = worker.parameters["a"]
        p.data = p.data.half()
        gradient = torch.full((640,), 64_000.0)
        gradient[::2] *= 0.9
        if op == "Sum":
            gradient[:320] /= ranks
            gradient[320:] = 64_000
        worker.backward({"a": gradient.half()})
        worker.optimizer.step()
        return p.grad.clone()

    results, _ = on_ranks(ranks, program, {"a": 640}, 2, op=getattr(hvd, op), hosts=hosts)
    for got in results:
        assert got.dtype is torch.float16 and got[:320].isfinite().all()
        if op == "Sum" and ranks == 3:  # 192,000
            assert got[320:].isinf().all()


@WORLDS
@pytest.mark.parametrize("bits", [0.125, 0.25, 0.5, 1, 2, 3, 4, 5, 8, 16])
def test_sums_of_huge_values_are_finite(ranks, hosts, bits):
    """A code may stand for more than twice the largest value of its block; below one bit values wait for many steps."""
    value = (7e37 if bits >= 1 else 7e36) / ranks

    def program(worker: Worker):
        return [worker.step({"a": torch.full((640,), value)})["a"] for _ in range(8)]

    results, _ = on_ranks(ranks, program, {"a": 640}, bits, hosts=hosts)
    assert all(got.isfinite().all() and got.any() for each in results for got in each)


@pytest.mark.promise("From 5 bits on, float16 sums that are too large become infinite.")
@WORLDS
@pytest.mark.parametrize("bits", [5, 6, 7, 8, 16])
def test_a_float16_sum_that_does_not_fit_is_infinite_and_one_that_fits_is_not(ranks, hosts, bits):
    """As uncompressed: a `GradScaler` relies on it. The bound is that of the level's rounding."""

    def program(worker: Worker):
        p = worker.parameters["a"]
        p.data = p.data.half()
        found = []
        for step in range(6):
            gradient = 65_000 / ranks * noise("a", 640, 0, step).sign()
            gradient[::3] *= 0.3 + 0.1 * worker.transport.rank
            if step == 5:
                gradient[7] = (88_000 if bits > 5 else 120_000) / ranks
            worker.optimizer.zero_grad()
            worker.backward({"a": gradient.half()})
            worker.optimizer.step()
            found.append(p.grad.isinf().sum().item())
        return found, p.grad[7].item()

    results, _ = on_ranks(ranks, program, {"a": 640}, bits, op=hvd.Sum, hosts=hosts)
    assert all(each == ([0] * 5 + [1], float("inf")) for each in results), results


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
    travels = torch.bfloat16 if takes and bits == 32 else torch.float32  # a ticket, or itself
    assert {sent.tensor.dtype for sent in world.sent if sent.name == "allreduce.a"} == {travels}


def test_complex_and_skipped_parameters_travel_as_they_are():
    sizes = {"a": 130, "skipped": 140, "small": 5, "complex": 150}

    def program(transport):
        worker = Worker(transport, sizes, 1, skip=lambda name, p: name == "skipped" and p.shape == (140,))
        worker.parameters["complex"].data = torch.zeros(150, dtype=torch.complex64)
        gradients = {**worker.noise(0), "complex": torch.full((150,), 1 + 2j)}
        return worker.step(gradients)

    world = RecordingWorld(2)
    results = world.run(program)
    expected = (noise("skipped", 140, 0, 0) + noise("skipped", 140, 1, 0)) / 2
    torch.testing.assert_close(results[0]["skipped"], expected)
    assert torch.equal(results[0]["complex"], torch.full((150,), 1 + 2j))
    lengths = {sent.name: sent.tensor.numel() for sent in world.sent if sent.name.startswith("allreduce")}
    assert lengths == {"allreduce.a": 1, "allreduce.skipped": 140, "allreduce.small": 1, "allreduce.complex": 150}


@pytest.mark.parametrize(("groups", "skipped", "there"), [(2, "a", True), (2, "", False), (None, "a", False)])
def test_a_group_may_have_skipped_tensors_on_a_gpu(monkeypatch, groups, skipped, there):
    """Horovod refuses groups of tensors on several devices: tickets are where the skipped ones are."""
    asked = set()

    class Noted(session.StepGradients):
        def __init__(self, step, source, *, on_device):
            asked.add(on_device)
            super().__init__(step, source, on_device=on_device)

    monkeypatch.setattr(session, "StepGradients", Noted)

    def program(transport):
        worker = Worker(transport, {"a": 130, "b": 140}, 4, skip=lambda name, p: name == skipped)
        worker.optimizer._groups = groups
        worker.step(worker.noise(0))

    RecordingWorld(2).run(program)
    assert asked == {there}


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


@pytest.mark.parametrize("fp16", [False, True])
def test_what_is_skipped_travels_as_float16_if_asked(fp16):
    def program(worker: Worker):
        return worker.step(worker.noise(0))["skipped"]

    arguments = {"fp16_skipped": fp16, "skip": lambda name, _: name == "skipped"}
    results, world = on_ranks(2, program, {"a": 130, "skipped": 5}, 4, **arguments)
    [sent, _] = [sent.tensor for sent in world.sent if sent.name == "allreduce.skipped"]
    assert sent.dtype is (torch.float16 if fp16 else torch.float32)
    expected = (noise("skipped", 5, 0, 0) + noise("skipped", 5, 1, 0)) / 2
    assert results[0].dtype is torch.float32
    torch.testing.assert_close(results[0], expected, rtol=2e-3 if fp16 else 1e-6, atol=2e-3 if fp16 else 1e-6)


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


class Densifying(SimulatedOptimizer):
    """As with `sparse_as_dense`: what is compressed is made from the gradient, and nobody's `.grad`."""

    def _submit(self, p: torch.nn.Parameter) -> None:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        dense = p.grad.clone()
        wire, context = self._compression.compress(dense)
        handle = self._transport.sum(wire, f"allreduce.{self._parameter_names[p]}")
        self._handles[p] = handle, context


@WORLDS
def test_a_gradient_made_dense_on_the_way_is_its_parameters(ranks, hosts):
    def program(worker: Worker):
        worker.optimizer = Densifying(worker.parameters, worker.quantizer, worker.transport)
        return [worker.step(worker.noise(step)) for step in range(2)][-1]

    results, world = on_ranks(ranks, program, {"a": 130, "b": 200}, 16, hosts=hosts)
    assert all(len(sent.tensor) == 1 for sent in world.sent if sent.name.startswith("allreduce"))
    for name, size in (("a", 130), ("b", 200)):
        expected = sum(noise(name, size, rank, 1) for rank in range(ranks)) / ranks
        assert (results[0][name] - expected).norm() <= 2e-3 * expected.norm()


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
        torch.testing.assert_close(gradient, mean_of("a", 640, 1, range(2), 2))
