"""The compressor on one worker: arguments, and what needs no other rank. The rest is in parallel/bodies."""

import horovod.torch as hvd
import pytest
import torch

from hvd_dyncomp import Controller, DynamicQuantizer, Static
from hvd_dyncomp.exchange.binding import Binding


@pytest.fixture(autouse=True, scope="module")
def horovod():
    hvd.init()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"error_feedback": 1}, "error_feedback.*1"),
        ({"rounding": "up"}, "rounding.*'up'"),
        ({"block_size": 100}, "block_size must be a power of two.*100"),
        ({"block_size": 32}, "block_size.*32"),
        ({"block_size": 2**17}, "block_size.*131072"),
        ({"block_size": 512.0}, "block_size.*512.0"),
        ({"min_numel": 0}, "min_numel.*0"),
        ({"bucket_bytes": -1}, "bucket_bytes.*-1"),
        ({"seed": "x"}, "seed.*'x'"),
        ({"named_parameters": [1, 2]}, "named_parameters"),
        ({"named_parameters": [("a", torch.zeros(1)), ("a", torch.zeros(1))]}, r"unique names, got \['a'\]"),
    ],
)
def test_bad_arguments(arguments, text):
    with pytest.raises(ValueError, match=text):
        DynamicQuantizer(**arguments)


def test_a_policy_is_no_controller():
    with pytest.raises(TypeError, match="controller must be a Controller"):
        DynamicQuantizer(Static(4))


def test_defaults():
    q = DynamicQuantizer()
    assert isinstance(q.controller, Controller) and q.controller.bits == 4
    assert q.meter.records == {}


def test_one_worker_trains_as_without():
    """Horovod registers no hooks for a single worker; nothing must stand in its way."""
    model = torch.nn.Linear(100, 50)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), compression=DynamicQuantizer())
    before = model.weight.detach().clone()
    model(torch.ones(4, 100)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), before - 0.1 * 4)


def test_state_before_the_first_step_round_trips():
    q, other = DynamicQuantizer(), DynamicQuantizer()
    other.load_state_dict(q.state_dict())
    assert other.state_dict() == q.state_dict()


@pytest.mark.parametrize("state", [{}, {"steps": 1}, {"residuals": {}}])
def test_loading_something_else_is_refused(state):
    with pytest.raises(ValueError, match="state must come from DynamicQuantizer.state_dict"):
        DynamicQuantizer().load_state_dict(state)


class Optimizer(torch.optim.SGD):
    """As much of Horovod's optimizer as a binding looks at."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self._requires_update = set(parameters)
        self._parameter_names = {p: f"p{i}" for i, p in enumerate(parameters)}
        self.process_set = None
        self.op = hvd.Average


def test_gradients_are_recognised_in_any_order():
    parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(7)]
    optimizer = Optimizer(parameters)
    binding = Binding(optimizer, None)
    for order in ([6, 5, 4, 3, 2, 1, 0], [0, 1, 2, 3, 4, 5, 6], [3, 1, 6, 0], [5, 2, 4, 3], [6, 5, 4, 3, 2, 1, 0]):
        for p in parameters:
            p.grad = torch.zeros(3)
        assert [binding.name_of_gradient(parameters[i].grad) for i in order] == [f"p{i}" for i in order]
    assert binding.name_of_gradient(torch.zeros(3)) is None
    assert sorted(binding._order) == list(range(7))
