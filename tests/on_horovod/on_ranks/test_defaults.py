"""torch's default device and dtype are the user's own business: a training on CPUs is the same, whatever they are.

On the device that is the default here ("meta") tensors have no values, so that one which is made there by mistake is
found. On GPUs it would be one that waits, or that Horovod takes for another rank's.
"""

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import horovod.torch as hvd
import pytest
import torch
from problem import same_on_all_ranks

from hvd_dyncomp import Controller, DynamicQuantizer, LockstepError, Schedule, Static, kernels
from hvd_dyncomp.diagnostics import relative_errors

SHAPES = {"matrix": (64, 80), "skipped": (30, 10), "long": (3000,), "bias": (10,)}
EMBEDDING = (50, 8)  # whose gradient stays sparse, and which Horovod exchanges itself
# With others, Horovod's own sums may depend on what is fused with what.
ARGUMENTS = {
    "small tensors": {"min_numel": 4000},
}


@contextmanager
def usual(device: str | None = None, dtype: torch.dtype = torch.float32) -> Iterator[None]:
    """Has the program's defaults be these, as its first lines would."""
    torch.set_default_device(device)
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


UNUSUAL = {"device": {"device": "meta"}, "float64": {"dtype": torch.float64}, "bfloat16": {"dtype": torch.bfloat16}}


class Run:
    """A training that says of all tensors where they are, and of which dtype. `prefix`: of the parameters' names."""

    def __init__(self, make: Callable[[Controller], object], prefix: str = "") -> None:
        self.controller = Controller(Schedule({0: 2, 3: 32, 4: 4}))
        self.compression = make(self.controller)
        here = {"dtype": torch.float32, "device": "cpu"}
        self.parameters = {name: torch.nn.Parameter(torch.zeros(shape, **here)) for name, shape in SHAPES.items()}
        self.parameters["rows"] = torch.nn.Parameter(torch.zeros(EMBEDDING, **here))
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(self.parameters.values(), lr=0.1),
            named_parameters=[(prefix + name, parameter) for name, parameter in self.parameters.items()],
            compression=self.compression,
        )
        self.noise = torch.Generator("cpu").manual_seed(hvd.rank())

    def step(self, used: tuple[str, ...] = tuple(SHAPES)) -> None:
        self.optimizer.zero_grad()
        for name in used:
            p = self.parameters[name]
            p.backward(torch.randn(p.shape, generator=self.noise, dtype=p.dtype, device=p.device))
        rows = torch.arange(5, dtype=torch.int64, device="cpu")
        torch.nn.functional.embedding(rows, self.parameters["rows"], sparse=True).sum().backward()
        self.optimizer.step()

    def weights(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.parameters.values()]


def stock() -> list[torch.Tensor]:
    run = Run(lambda controller: hvd.Compression.none)
    for _ in range(4):
        run.step()
    return run.weights()


def ours(**arguments) -> tuple[list[torch.Tensor], list]:
    """All that can be compared, and what is known by a clock, of a run with epochs, checkpoints and an elastic job."""

    def make(controller: Controller) -> DynamicQuantizer:
        skip = {"skip": lambda name, parameter: name == "skipped"}
        return DynamicQuantizer(controller, bucket_bytes=15_000, **skip, **arguments)

    run = Run(make)
    quantizer = run.compression
    elastic = hvd.elastic.TorchState(quantizer=quantizer, controller=run.controller)
    errors = []
    for epoch in range(6):
        for _ in range(4):
            run.step()
        run.step(("matrix",) if hvd.rank() else ("matrix", "long"))
        errors.append(relative_errors(quantizer, {name: p.grad for name, p in run.parameters.items()}))
        run.optimizer.synchronize()  # of what no backward has made
        run.controller.step({"loss": 1.0 / (1 + epoch)}, num_samples=torch.tensor(3 + hvd.rank(), device="cpu"))
        blob = io.BytesIO()
        torch.save(quantizer.state_dict(), blob)
        blob.seek(0)
        quantizer.load_state_dict(torch.load(blob, weights_only=True))
        elastic.save()
        if epoch % 2:
            elastic.restore()
            elastic.sync()
            quantizer.attach(run.optimizer)  # otherwise in a hook, where torch has no defaults
    weights, state = run.weights(), quantizer.state_dict()
    assert same_on_all_ranks(weights, "weights")
    total = quantizer.meter.total()
    found = [*weights, *state["residuals"].values(), *(s["values"] for s in state["shard_residuals"].values())]
    return found, [errors, total.sent_bytes, run.controller.state_dict()]


@pytest.mark.parametrize("defaults", UNUSUAL)
def test_stock_horovod_does_the_same(defaults):
    expected = stock()
    with usual(**UNUSUAL[defaults]):
        found = stock()
    assert all(map(torch.equal, expected, found))


@pytest.mark.parametrize("defaults", UNUSUAL)
@pytest.mark.parametrize(
    ("served", "arguments"), [*(("native", name) for name in ARGUMENTS), ("portable", "small tensors")]
)
def test_a_training_is_the_same(served, arguments, defaults, monkeypatch):
    if served == "portable":
        monkeypatch.setattr(kernels, "backends", {"cpu": kernels.portable})
    with usual(**UNUSUAL[defaults]):
        found, known = ours(**ARGUMENTS[arguments])
    kinds = {(tensor.device.type, tensor.dtype) for tensor in found}
    assert kinds == {("cpu", torch.float32), ("cpu", torch.bfloat16)}, "weights, and residuals"
    if "time" not in arguments:
        expected, expected_known = ours(**ARGUMENTS[arguments])
        assert all(map(torch.equal, expected, found))
        assert str(expected_known) == str(known)


@pytest.mark.parametrize("defaults", UNUSUAL)
def test_a_rank_that_fails_is_heard(defaults, rank, size):
    """In its words, whatever the defaults are."""
    with usual(**UNUSUAL[defaults]):

        def make(controller: Controller) -> DynamicQuantizer:
            other = [("other", torch.nn.Parameter(torch.zeros(2000, device="cpu")))] if rank == size - 1 else None
            return DynamicQuantizer(Controller(Static(4)), named_parameters=other)

        # Names of its own: what Horovod was handed on the others is under way until the job ends.
        run = Run(make, f"{defaults}.")
        with pytest.raises(ValueError if rank == size - 1 else LockstepError, match="named_parameters"):
            run.step()
