"""Copies of a compressed model."""

import copy
import io
import pickle

import pytest
import torch
from problem import Linear, assert_means, gradients, same_on_all_ranks
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from hvd_dyncomp import AllRanks, Averager, Controller, ddp

pytestmark = pytest.mark.promise("A compressed model can be copied, pickled and averaged.")


def saved_and_loaded(model):
    """As a whole: a process group cannot be saved, and torch takes the one of all ranks."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def averaged(model):
    average = AveragedModel(model)
    average.update_parameters(model)
    return average.module


@pytest.mark.parametrize("copied", [copy.deepcopy, averaged, saved_and_loaded])
def test_a_copy_is_a_model_that_can_be_compressed(copied):
    model = DistributedDataParallel(Linear(), bucket_cap_mb=0.01)
    quantizer = ddp.compress(model, 16, block_size=64)
    for seed in range(2):  # the copy is made between backward and step
        model.zero_grad()
        model(seed).backward()
    other = copied(model)
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True))
    sent = quantizer.meter.total().sent_bytes
    for seed in range(2, 6):
        if seed == 4:
            ddp.compress(other, 8, block_size=64)
        other.zero_grad()
        other(seed).backward()
        assert_means(gradients(other), model.module.mean(seed), 32 if seed < 4 else 8)
        assert same_on_all_ranks(gradients(other))
    assert quantizer.meter.total().sent_bytes == sent
    model.zero_grad()
    model(9).backward()  # and goes on itself
    assert_means(gradients(model), model.module.mean(9), 16)
    with pytest.raises(ValueError, match="has a communication hook already"):
        ddp.compress(model, 4)


def test_what_belongs_to_its_ranks_is_not_copied():
    """A `TypeError` of pickle's own, about a lock or a weak reference, would help nobody."""
    quantizer = ddp.compress(DistributedDataParallel(Linear()), 4)
    averager = Averager([("a", torch.zeros(3000))], 4)
    for copied in (copy.deepcopy, pickle.dumps, lambda one: torch.save(one, io.BytesIO())):
        for one, text in (
            (quantizer, "a quantizer of hvd_dyncomp.ddp belongs to its model and cannot be copied or pickled: make"),
            (averager, "an Averager belongs to its model and cannot be copied or pickled: make"),
            (AllRanks(averager), r"AllRanks cannot be copied or pickled.* save its state_dict\(\)"),
        ):
            with pytest.raises(TypeError, match=text):
                copied(one)
    controller = Controller(4)
    assert pickle.loads(pickle.dumps(controller)).bits == 4  # noqa: S301
    controller.step({})
    with pytest.raises(TypeError, match=r"nor can a Controller that has used them: save the .* state_dict\(\)"):
        pickle.dumps(controller)
    assert copy.deepcopy(controller).epoch == 1
