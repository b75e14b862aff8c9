"""The states of all ranks in a folder of torch.distributed.checkpoint, of DDP and of an `Averager`."""

import io

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from problem import Linear, distributed
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

from hvd_dyncomp import Averager, Controller, LockstepError, PerRank, Schedule, ddp, less_momentum

pytestmark = pytest.mark.promise("A restarted run equals the uninterrupted run bit for bit.")
LEVELS = {0: 1, 1: 4}  # at 1 bit, residuals matter


class Ddp:
    """A model that trains, its optimizer and its quantizer."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        module = Linear()
        for value in module.values:
            value.data.normal_()
        self.model, self.quantizer = distributed(Controller(Schedule(LEVELS)), module=module)
        self.optimizer = less_momentum(torch.optim.AdamW(self.model.parameters(), lr=0.01))

    def train(self, seed: int) -> list[torch.Tensor]:
        self.optimizer.zero_grad()
        self.average(seed)
        self.optimizer.step()
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    def average(self, seed: int) -> None:
        self.model(seed).backward()

    def state(self, **arguments) -> dict:
        model_state, optimizer_state = get_state_dict(self.model, self.optimizer)
        return {"model": model_state, "optimizer": optimizer_state, "quantizer": PerRank(self.quantizer, **arguments)}

    def load(self, folder: str, **arguments) -> None:
        state = self.state(**arguments)
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


class OwnLoop(Ddp):
    """Likewise, with an averager. It can only be made of parameters that are equal on all ranks."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = Linear()
        for value in self.model.values:
            value.data.normal_()
        self.quantizer = Averager(self.model.named_parameters(), Schedule(LEVELS), block_size=64, bucket_bytes=20_000)
        self.optimizer = less_momentum(torch.optim.AdamW(self.model.parameters(), lr=0.01))

    def average(self, seed: int) -> None:
        super().average(seed)
        self.quantizer.mean_([parameter.grad for parameter in self.model.parameters()])


def residuals(quantizer) -> list[torch.Tensor]:
    state = quantizer.state_dict()
    shards = [state["shard_residuals"][name]["values"] for name in sorted(state["shard_residuals"])]
    return [*(state["residuals"][name] for name in sorted(state["residuals"])), *shards]


@pytest.mark.parametrize("kind", [Ddp, OwnLoop])
@pytest.mark.parametrize("named", [False, True])
def test_a_run_continues_bit_for_bit(kind, named, folder, size):
    """In a new quantizer, before its first step."""
    run = kind(0)
    for seed in range(2):
        run.train(seed)
    run.quantizer.controller.step({})
    dcp.save(run.state(), checkpoint_id=folder)
    kept = residuals(run.quantizer)
    assert any(each.any() for each in kept)
    expected = [run.train(seed) for seed in (2, 3)]

    run = kind(1)
    run.load(folder, **({"ranks": size} if named else {}))
    assert run.quantizer.bits == 4 and run.quantizer.meter.total().steps == 2
    assert all(map(torch.equal, kept, residuals(run.quantizer)))
    for seed, wanted in zip((2, 3), expected, strict=True):
        assert all(map(torch.equal, run.train(seed), wanted))


def test_with_another_number_of_ranks_residuals_begin_at_zero(rank, size):
    """Here as if the first rank had been the only one, or one had had a twin."""
    run = Ddp(0)
    run.train(0)
    everyone = [None] * size
    dist.all_gather_object(everyone, PerRank(run.quantizer).state_dict()[f"rank{rank}"])
    for ranks in (1, size + 1):
        own = Ddp(1).quantizer
        state = {f"rank{i}": saved({**loaded(everyone[i % size]), "ranks": ranks}) for i in range(ranks)}
        PerRank(own, ranks=ranks).load_state_dict(state)
        assert own.state_dict()["steps"] == 1 and not any(each.any() for each in residuals(own))


def loaded(state: bytes) -> dict:
    return torch.load(io.BytesIO(state), weights_only=True)


def saved(state: dict) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def test_models_in_groups_of_some_ranks_share_a_folder(rank, size, folder):
    """Each rank is number 0 of its own group, and has made as many steps as its number in the job says."""
    group = [dist.new_group([each]) for each in range(size)][rank]

    def task():
        model = DistributedDataParallel(Linear(), process_group=group)
        return model, ddp.compress(model, 4)

    model, quantizer = task()
    for seed in range(rank + 1):
        model(seed).backward()
    dcp.save({"quantizer": PerRank(quantizer)}, checkpoint_id=folder)
    _, quantizer = task()
    dcp.load({"quantizer": PerRank(quantizer)}, checkpoint_id=folder)
    assert quantizer.meter.total().steps == rank + 1
    text = f"ranks must be None for a quantizer that works among 1 of {size} ranks, got 1: load its state with as many"
    for call in (PerRank(quantizer, ranks=1).state_dict, lambda: PerRank(quantizer, ranks=1).load_state_dict({})):
        with pytest.raises(ValueError, match=text):
            call()


def test_what_does_not_fit_is_an_error_on_all_ranks(rank, size, folder):
    run = Ddp(0)
    run.train(0)
    dcp.save({"quantizer": PerRank(run.quantizer)}, checkpoint_id=folder)
    with pytest.raises(CheckpointException, match=f"Missing key in checkpoint state_dict: quantizer.rank{size}"):
        dcp.load({"quantizer": PerRank(run.quantizer, ranks=size + 1)}, checkpoint_id=folder)
    text = rf"state was saved by {size} ranks; load it with PerRank\(quantizer, ranks={size}\)"
    with pytest.raises(ValueError, match=text):
        dcp.load({"quantizer": PerRank(run.quantizer, ranks=size - 1)}, checkpoint_id=folder)
    state = PerRank(run.quantizer).state_dict()
    for odd, key in ((0, "rank0"), (size - 1, "nothing")):
        wrong = {key: b""} if rank == odd else state
        with pytest.raises(
            ValueError if rank == odd else LockstepError, match=r"must come from PerRank.state_dict\(\)"
        ):
            PerRank(run.quantizer).load_state_dict(wrong)
    run.train(1)
