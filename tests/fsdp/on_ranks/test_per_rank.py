"""The states of all ranks in a folder of torch.distributed.checkpoint, with the model and the optimizer."""

import io

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sharded import Blocks, a_step, compressed, mesh
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from hvd_dyncomp import Controller, LockstepError, PerRank, Schedule, fsdp, less_momentum

pytestmark = pytest.mark.promise("A restarted run equals the uninterrupted run bit for bit.")


def task(seed):
    """A model of one mesh that trains at 1 bit, where residuals matter, and then at 4; its optimizer and quantizer."""
    torch.manual_seed(seed)
    levels = Controller(Schedule({0: 1, 1: 4}), transport=fsdp.quantizer.transport())
    _, model, quantizer = compressed(levels, whole=Blocks())
    return model, less_momentum(torch.optim.AdamW(model.parameters(), lr=0.01)), quantizer


def train(model, optimizer, seed):
    a_step(model, seed)
    optimizer.step()
    return [parameter.to_local().clone() for parameter in model.parameters()]


def state_of(model, optimizer, quantizer, **arguments):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "quantizer": PerRank(quantizer, **arguments)}


def load(folder, model, optimizer, quantizer, **arguments):
    state = state_of(model, optimizer, quantizer, **arguments)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


@pytest.mark.parametrize("named", [False, True])
def test_a_run_continues_bit_for_bit(named, folder, size):
    model, optimizer, quantizer = task(0)
    for seed in range(2):
        train(model, optimizer, seed)
    quantizer.controller.step({})
    dcp.save(state_of(model, optimizer, quantizer), checkpoint_id=folder)
    residuals = quantizer.state_dict()["residuals"]
    assert any(each.any() for each in residuals.values())
    expected = [train(model, optimizer, seed) for seed in (2, 3)]

    model, optimizer, quantizer = task(1)
    load(folder, model, optimizer, quantizer, **({"ranks": size} if named else {}))
    assert quantizer.bits == 4 and quantizer.meter.total().steps == 2
    again = quantizer.state_dict()["residuals"]
    assert again.keys() == residuals.keys()
    for seed, wanted in zip((2, 3), expected, strict=True):
        found = train(model, optimizer, seed)
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_with_another_number_of_ranks_residuals_begin_at_zero(rank):
    """Here as if the ranks of one replica had been all that there were. The level is the saved one."""
    model, optimizer, quantizer = task(0)
    for seed in range(2):
        train(model, optimizer, seed)
    quantizer.controller.step({})
    fewer, everyone = mesh()["shard"].size(), [None] * dist.get_world_size()
    dist.all_gather_object(everyone, PerRank(quantizer).state_dict())
    state = {key: torch_bytes(each, ranks=fewer) for one in everyone[:fewer] for key, each in one.items()}
    model, optimizer, loaded = task(1)
    for seed in range(2):  # the first is not compressed
        train(model, optimizer, seed)
    assert any(each.any() for each in loaded.state_dict()["residuals"].values())
    PerRank(loaded, ranks=fewer).load_state_dict(state)
    assert not any(each.any() for each in loaded.state_dict()["residuals"].values())
    assert loaded.bits == 4 and loaded.meter.total().steps == (2 if rank < fewer else 0)  # of this rank


def torch_bytes(packed, **changes):
    """A rank's state with other values."""
    file = io.BytesIO()
    torch.save({**torch.load(io.BytesIO(packed), weights_only=True), **changes}, file)
    return file.getvalue()


def test_what_does_not_fit_is_refused(rank, size, folder):
    """On all ranks, and nothing has changed."""
    model, optimizer, quantizer = task(0)
    train(model, optimizer, 0)
    mine = PerRank(quantizer).state_dict()
    [key] = mine
    before = quantizer.state_dict()
    wrong = [
        ({}, "must come from PerRank.state_dict"),
        ({key: b"nothing"}, "must come from PerRank.state_dict"),
        ({key: torch_bytes(mine[key], ranks=size + 1)}, rf"was saved by {size + 1} ranks; load it with PerRank\("),
    ]
    for state, text in wrong:
        odd = rank == size - 1
        with pytest.raises(ValueError if odd else LockstepError, match=text):
            PerRank(quantizer).load_state_dict(state if odd else mine)
        if odd:
            assert quantizer.state_dict()["meter"] == before["meter"]
        quantizer.load_state_dict(before)
    dcp.save({"quantizer": PerRank(quantizer)}, checkpoint_id=folder)
    with pytest.raises(CheckpointException, match=rf"quantizer.rank{size}"):
        dcp.load({"quantizer": PerRank(quantizer, ranks=size + 1)}, checkpoint_id=folder)
    for ranks in (0, "2"):
        with pytest.raises(ValueError, match="ranks must be"):
            PerRank(quantizer, ranks=ranks)
    with pytest.raises(TypeError, match="quantizer must be .* what compress has returned, got None"):
        PerRank(None)
