"""Below one bit, an optimizer's momentum is one too many: rank 0 says so, once."""

import logging

import pytest
import torch
from simulated import Worker, on_ranks, set_level

from hvd_dyncomp.horovod_optimizer import momentum_of


@pytest.mark.parametrize(("bits", "momentum", "said"), [(0.25, 0.9, 1), (0.25, 0.0, 0), (1, 0.9, 0), (32, 0.9, 0)])
def test_it_is_said_once_and_where_it_matters(bits, momentum, said, caplog):
    def program(worker: Worker) -> None:
        worker.optimizer.param_groups[0]["momentum"] = momentum
        for step in range(6):
            set_level(worker.controller, 4 if step % 3 == 2 else bits)
            worker.step(worker.noise(step))

    with caplog.at_level(logging.WARNING, logger="hvd_dyncomp"):
        on_ranks(2, program, {"a": 300}, bits)
    texts = [record.getMessage() for record in caplog.records if "momentum" in record.getMessage()]
    assert len(texts) == said
    assert all("momentum of 0.9, and below one bit" in text for text in texts)


@pytest.mark.parametrize(
    ("kind", "arguments", "momentum"),
    [
        (torch.optim.SGD, {"momentum": 0.8}, 0.8),
        (torch.optim.SGD, {}, 0.0),
        (torch.optim.AdamW, {}, 0.9),
        (torch.optim.Adam, {"betas": (0.0, 0.99)}, 0.0),
        (torch.optim.RMSprop, {"momentum": 0.3}, 0.3),
        (torch.optim.Adagrad, {}, 0.0),
    ],
)
def test_what_an_optimizer_carries_on(kind, arguments, momentum):
    assert momentum_of(kind([torch.zeros(1)], lr=0.1, **arguments)) == momentum


def test_the_most_of_the_groups_counts():
    groups = [{"params": [torch.zeros(1)], "momentum": 0.9}, {"params": [torch.zeros(1)]}]
    assert momentum_of(torch.optim.SGD(groups, lr=0.1)) == 0.9
