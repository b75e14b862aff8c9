"""Errors of single tensors."""

import math

import pytest
import torch
from simulated import Worker, mean_of, on_ranks, places

from hvd_dyncomp.diagnostics import relative_errors

SCALES = {"a": 1, "b": 100}


def scaled(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of different magnitudes: errors of one are not those of another."""
    return {name: SCALES[name] * gradient for name, gradient in gradients.items()}


def errors_of(worker: Worker) -> dict[str, float]:
    return relative_errors(worker.quantizer, {name: p.grad for name, p in worker.parameters.items()})


def true_errors(means: dict[str, torch.Tensor], step: int, ranks: int) -> dict[str, float]:
    exact = scaled({name: mean_of(name, len(mean), step, range(ranks), ranks) for name, mean in means.items()})
    return {name: float((mean - exact[name]).norm() / mean.norm()) for name, mean in means.items()}


@places("2", "2x2", "2x2 dealt")
@pytest.mark.parametrize("bits", [0.25, 1, 4, 8])
def test_errors_are_how_far_means_are_off(ranks, hosts, bits):
    """Of the first step, in which nothing was owed before: later ones' errors are those of sums."""

    def program(worker: Worker):
        means = worker.step(scaled(worker.noise(0)))
        return errors_of(worker), means

    sizes = {"a": 64 * 40, "b": 64 * 50}
    results, _ = on_ranks(ranks, program, sizes, bits, hosts=hosts)
    expected = true_errors(results[0][1], 0, ranks)
    for errors, _ in results:
        assert errors and set(errors) <= set(sizes)
        for name, error in errors.items():
            assert error == pytest.approx(expected[name], rel=0.15)
    assert set().union(*(errors for errors, _ in results)) == set(sizes)


def test_small_tensors_of_a_bucket_count_as_one():
    """Under the name of the first that backward makes. A skipped one has no residual."""
    sizes = {"skipped": 3000, "last": 64 * 9, "large": 64 * 40, "first": 64 * 5}
    ones = torch.ones(64 * 9)  # which travel without an error

    def program(worker: Worker):
        return worker.step({**worker.noise(0), "last": ones}), errors_of(worker)

    results, _ = on_ranks(2, program, sizes, 4, min_numel=1000, skip=lambda name, _: name == "skipped")
    for means, errors in results:
        assert set(errors) == {"large", "first"}
        error = float((means["first"] - mean_of("first", 64 * 5, 0, range(2), 2)).norm())
        assert errors["first"] == pytest.approx(error / math.hypot(means["first"].norm(), ones.norm()), rel=0.15)


def test_without_gradients_steps_or_feedback_there_are_none():
    def program(worker: Worker):
        before = errors_of(worker)
        worker.step(worker.noise(0))
        worker.optimizer.zero_grad()
        return before, errors_of(worker)

    assert on_ranks(2, program, {"a": 640}, 4)[0] == [({}, {})] * 2
    found, _ = on_ranks(2, lambda w: w.step(w.noise(0)) and errors_of(w), {"a": 640}, 4, error_feedback=False)
    assert found == [{}, {}]
    found, _ = on_ranks(2, lambda w: w.step(w.noise(0)) and errors_of(w), {"a": 640}, 32)
    assert found == [{"a": 0.0}] * 2


def test_names_that_the_quantizer_does_not_know_are_refused():
    """As those of a model that DistributedDataParallel wraps; what has no gradient does not matter."""

    def program(worker: Worker):
        gradients = worker.step(worker.noise(0))
        with pytest.raises(ValueError, match=r"^gradients must have the names .* such as a, got module\.a$"):
            relative_errors(worker.quantizer, {f"module.{name}": gradient for name, gradient in gradients.items()})
        return relative_errors(worker.quantizer, {**gradients, "frozen": None})

    assert on_ranks(2, program, {"a": 640}, 32)[0] == [{"a": 0.0}] * 2


def test_what_is_no_quantizer_is_refused():
    with pytest.raises(TypeError, match="^quantizer must be a DynamicQuantizer, an Averager or .*, got 4$"):
        relative_errors(4, {})
