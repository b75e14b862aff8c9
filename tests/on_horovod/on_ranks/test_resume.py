"""A run that was interrupted and resumed is the run that was not."""

import io
import json

import horovod.torch as hvd
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from problem import Problem

from hvd_dyncomp import AllRanks, Controller, DynamicQuantizer, PerRank, StepFunction


class Run:
    """Ten epochs of three steps, which pass through 2 bits, a release of two epochs and 4 bits."""

    def __init__(self):
        policy = StepFunction(
            levels=(2, 4),
            thresholds=(0.9,),
            loss=None,
            stagnation="time",
            stagnation_patience=2,
            uncompressed_epochs=2,
            cooldown=0,
        )
        self.controller = Controller(policy)
        self.quantizer = DynamicQuantizer(self.controller, bucket_bytes=30_000)
        self.problem = Problem(compression=self.quantizer)

    def epochs(self, first, last):
        for epoch in range(first, last):
            for step in range(3):
                self.problem.reduce(self.problem.draw(seed=10 * epoch + step))
                self.problem.step()
            self.controller.step({"val_accuracy": 0.1 * epoch}, epoch=epoch)

    def save(self):
        """Through bytes, and only of what may be loaded without unpickling code."""
        blob = io.BytesIO()
        weights = {name: p.detach() for name, p in self.problem.parameters.items()}
        torch.save({"weights": weights, "quantizer": self.quantizer.state_dict()}, blob)
        return blob.getvalue(), json.dumps(self.controller.state_dict())

    def load(self, saved):
        blob = torch.load(io.BytesIO(saved[0]), weights_only=True)
        for name, p in self.problem.parameters.items():
            p.data.copy_(blob["weights"][name])
        self.quantizer.load_state_dict(blob["quantizer"])
        self.controller.load_state_dict(json.loads(saved[1]))


def test_resume_equals_no_interruption():
    whole = Run()
    whole.epochs(0, 10)
    trace = [record.bits for record in whole.controller.history]
    released = [epoch for epoch, bits in enumerate(trace) if bits == 32]
    assert {2, 4, 32} == set(trace)
    # Interrupted at a compressed level, and between the two epochs of a release.
    for interruption in (2, released[0] + 2):
        before = Run()
        before.epochs(0, interruption)
        saved = before.save()
        after = Run()
        after.load(saved)
        after.epochs(interruption, 10)
        assert [record.bits for record in after.controller.history] == trace
        for name, p in after.problem.parameters.items():
            assert torch.equal(p, whole.problem.parameters[name]), name
        totals = [run.quantizer.meter.total() for run in (whole, after)]
        assert totals[0].sent_bytes == totals[1].sent_bytes and totals[0].steps == totals[1].steps


def test_one_state_of_all_ranks_resumes_as_well():
    """`hvd.broadcast_object` hands on what rank 0 has, as a framework's file does."""
    whole, before, after = Run(), Run(), Run()
    whole.epochs(0, 6)
    before.epochs(0, 3)
    state = hvd.broadcast_object(AllRanks(before.quantizer).state_dict(), root_rank=0, name="state")
    for name, p in after.problem.parameters.items():
        p.data.copy_(before.problem.parameters[name])
    AllRanks(after.quantizer).load_state_dict(state)
    after.epochs(3, 6)
    assert after.controller.history == whole.controller.history
    for name, p in after.problem.parameters.items():
        assert torch.equal(p, whole.problem.parameters[name]), name


def test_a_folder_of_torch_distributed_checkpoint_resumes_as_well(rank, size, tmp_path):
    """Which needs torch's process group, beside Horovod; its ranks have Horovod's numbers."""
    folder = hvd.broadcast_object(str(tmp_path), root_rank=0, name="folder")
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=size)
    try:
        whole, before, after = Run(), Run(), Run()
        whole.epochs(0, 6)
        before.epochs(0, 3)
        weights = {name: p.detach() for name, p in before.problem.parameters.items()}
        dcp.save({"weights": weights, "quantizer": PerRank(before.quantizer)}, checkpoint_id=f"{folder}/saved")
        weights = {name: p.detach() for name, p in after.problem.parameters.items()}
        dcp.load({"weights": weights, "quantizer": PerRank(after.quantizer)}, checkpoint_id=f"{folder}/saved")
    finally:
        dist.destroy_process_group()
    after.epochs(3, 6)
    assert after.controller.history == whole.controller.history
    for name, p in after.problem.parameters.items():
        assert torch.equal(p, whole.problem.parameters[name]), name
