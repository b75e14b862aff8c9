"""Bytes and errors of single tensors."""

import pytest
import torch
from simulated import BY_HOST, WORLDS, Worker, mean_of, on_ranks, places

from hvd_dyncomp.exchange.wire import GREETING_BYTES
from hvd_dyncomp.kernels import block_bytes
from hvd_dyncomp.meter import allreduce_bytes

SIZES = {"a": 64 * 3, "b": 64 * 8, "small": 5, "tiny": 2, "skipped": 70}
OPTIONS = {"skip": lambda name, _: name == "skipped", "min_numel": 8}
TENSORS = {"a", "b", "tiny", "skipped"}  # what is small has the name of what backward makes first


@WORLDS
@pytest.mark.parametrize("bits", [0.25, 4, 32])
def test_what_tensors_send_is_all_but_the_handshakes(ranks, hosts, bits):
    def program(worker: Worker):
        for step in range(3):
            worker.step(worker.noise(step))
        worker.optimizer.step()  # reduces once more, what no backward has made
        return worker.quantizer.meter

    meters, _ = on_ranks(ranks, program, SIZES, bits, hosts=hosts, **OPTIONS)
    tickets = 0 if bits == 32 else 4 * 4 * (len(SIZES) - 1)
    for meter in meters:
        assert set(meter.by_tensor()) == TENSORS
        total, tensors = meter.total(), meter.by_tensor().values()
        rest = allreduce_bytes(4 * ranks * GREETING_BYTES + tickets, ranks)
        assert sum(one.sent_bytes for one in tensors) == pytest.approx(total.sent_bytes - rest)
        n_hosts = len(set(hosts) or range(ranks))
        own = rest / allreduce_bytes(1, ranks) * allreduce_bytes(1, n_hosts) / len(meters) * n_hosts
        left = [one.total().leaving_bytes - sum(t.leaving_bytes for t in one.by_tensor().values()) for one in meters]
        assert sum(left) / len(left) == pytest.approx(own)


@places("2", "3", "2x2")
@pytest.mark.parametrize("bits", [0.25, 4, 8])
def test_a_message_is_divided_as_its_codes_are_long(ranks, hosts, bits):
    """Small tensors' codes may be longer. Each has blocks of its own here, so that the division is exact."""
    sizes = {"c": 64 * 2, "a": 64 * 4, "b": 64 * 8}
    program = lambda w: w.step(w.noise(0)) and w.quantizer.meter.by_tensor()  # noqa: E731
    sent, _ = on_ranks(ranks, program, sizes, bits, hosts=hosts, min_numel=64 * 3)
    for own in sent:
        assert own["a"].sent_bytes / own["b"].sent_bytes == pytest.approx(1 / 2)
        expected = 2 * block_bytes(max(bits, 8), 64) / (8 * block_bytes(bits, 64))
        assert own["c"].sent_bytes / own["b"].sent_bytes == pytest.approx(expected)


def test_tensors_are_counted_by_level():
    def program(worker: Worker):
        worker.step(worker.noise(0))
        worker.set_level(8)
        worker.step(worker.noise(1))
        return worker.quantizer.meter.tensors

    tensors, _ = on_ranks(2, program, {"a": 6400}, 4)
    for own in tensors:
        assert set(own) == {("a", 4), ("a", 8)}
        assert own["a", 8].sent_bytes - own["a", 4].sent_bytes == 6400 / 2


SCALES = {"a": 1, "b": 100}


def scaled(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of different magnitudes: errors of one are not those of another."""
    return {name: SCALES[name] * gradient for name, gradient in gradients.items()}


def true_errors(means: dict[str, torch.Tensor], step: int, ranks: int) -> dict[str, float]:
    exact = scaled({name: mean_of(name, len(mean), step, range(ranks), ranks) for name, mean in means.items()})
    return {name: float((mean - exact[name]).norm() / mean.norm()) for name, mean in means.items()}


@places("2", "2x2", "2x2 dealt")
@pytest.mark.parametrize("bits", [0.25, 1, 4, 8])
def test_errors_are_how_far_means_are_off(ranks, hosts, bits):
    """Of the first step, in which nothing was owed before: later ones' errors are those of sums."""

    def program(worker: Worker):
        means = worker.step(scaled(worker.noise(0)))
        return worker.quantizer.relative_errors(), means

    sizes = {"a": 64 * 40, "b": 64 * 50}
    results, _ = on_ranks(ranks, program, sizes, bits, hosts=hosts)
    expected = true_errors(results[0][1], 0, ranks)
    for errors, _ in results:
        assert errors and set(errors) <= set(sizes)
        for name, error in errors.items():
            assert error == pytest.approx(expected[name], rel=0.15)
    assert set().union(*(errors for errors, _ in results)) == set(sizes)


def test_among_three_they_are_those_of_the_first_quantization():
    results, _ = on_ranks(3, lambda w: (w.step(w.noise(0)), w.quantizer.relative_errors()), {"a": 6400}, 4)
    expected = true_errors(results[0][0], 0, 3)["a"]
    for _, errors in results:
        assert expected / 1.6 < errors["a"] < expected


@BY_HOST
def test_a_worker_knows_of_the_values_that_it_quantizes(ranks, hosts):
    """Its section of a bucket: two tensors as long as each other, two workers a host."""
    results, _ = on_ranks(
        ranks, lambda w: w.step(w.noise(0)) and w.quantizer.relative_errors(), {"a": 640, "b": 640}, 4, hosts=hosts
    )
    assert [list(errors) for errors in results] == [["b"] if rank % 2 == 0 else ["a"] for rank in range(ranks)]


def test_without_gradients_steps_or_feedback_there_are_none():
    def program(worker: Worker):
        before = worker.quantizer.relative_errors()
        worker.step(worker.noise(0))
        worker.optimizer.zero_grad()
        return before, worker.quantizer.relative_errors()

    assert on_ranks(2, program, {"a": 640}, 4)[0] == [({}, {})] * 2
    found, _ = on_ranks(
        2, lambda w: w.step(w.noise(0)) and w.quantizer.relative_errors(), {"a": 640}, 4, error_feedback=False
    )
    assert found == [{}, {}]
    found, _ = on_ranks(2, lambda w: w.step(w.noise(0)) and w.quantizer.relative_errors(), {"a": 640}, 32)
    assert found == [{"a": 0.0}] * 2
