"""What the program makes of gradients before they are reduced has no effect: one warning says so."""

import logging

import pytest
import torch
from simulated import Worker, on_ranks

from hvd_dyncomp.kernels import portable

SIZES = {"a": 130, "b": 500, "small": 5}


def said_by(program, caplog, bits: float) -> list[str]:
    with caplog.at_level(logging.WARNING, logger="hvd_dyncomp"):
        on_ranks(2, program, SIZES, bits)
    return [record.getMessage() for record in caplog.records]


def clip(worker: Worker) -> None:
    torch.nn.utils.clip_grad_norm_(worker.parameters.values(), 0.1)


@pytest.mark.parametrize("bits", [0.25, 4])
def test_clipping_before_synchronize_is_said_once(bits, caplog):
    def program(worker: Worker) -> None:
        for step in range(3):
            worker.backward(worker.noise(step))
            clip(worker)
            worker.optimizer.step()

    [said] = said_by(program, caplog, bits)
    assert "clipping" in said and "optimizer.synchronize()" in said


@pytest.mark.parametrize("bits", [4, 32])
@pytest.mark.parametrize("native", [True, False])
def test_what_is_right_is_not_worth_a_word(bits, native, caplog, monkeypatch):
    """Clipping means, accumulating, gradients that are copied or written by torch's operators."""
    if not native:
        monkeypatch.setattr("hvd_dyncomp.kernels.backends", {"cpu": portable})

    def program(worker: Worker) -> None:
        worker.parameters["b"].data = worker.parameters["b"].data.view(50, 10)
        for step in range(3):
            gradients = {name: gradient for name, gradient in worker.noise(step).items() if step or name != "a"}
            gradients["b"] = gradients["b"].view(10, 50).t()  # with strides
            worker.backward(gradients)
            worker.optimizer.synchronize()
            clip(worker)
            worker.optimizer.step()

    assert said_by(program, caplog, bits) == []
