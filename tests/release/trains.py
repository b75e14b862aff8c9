"""Trains on ranks by one front end: gradients become means, replicas stay equal, and a resumed run has the same bits.

Usage: trains.py ddp|averager|fsdp, under torchrun. Rank 0 says "trained", or what `compress` says of this torch.
Only what torch has had since 2.3 may be used here.
"""

import copy
import io
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import hvd_dyncomp

STEPS = 4  # of an epoch
ERROR = 0.02  # of a mean, at the first epoch's 8 bits


def with_ddp(module: nn.Module, levels: Any) -> tuple[nn.Module, Any, Callable[[], None]]:
    model = DistributedDataParallel(module)
    return model, hvd_dyncomp.ddp.compress(model, levels), lambda: None


def with_averager(module: nn.Module, levels: Any) -> tuple[nn.Module, Any, Callable[[], None]]:
    averager = hvd_dyncomp.Averager(module.named_parameters(), levels)
    return module, averager, lambda: averager.mean_([parameter.grad for parameter in module.parameters()])


def with_fsdp(module: nn.Module, levels: Any) -> tuple[nn.Module, Any, Callable[[], None]]:
    """Two replicas."""
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:  # before torch 2.6
        from torch.distributed._composable.fsdp import fully_shard
    hvd_dyncomp.fsdp.register_backend(levels)
    shape, override = (2, dist.get_world_size() // 2), {"replicate": "hvd_dyncomp"}
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"), backend_override=override)
    for part in (module[0], module):
        fully_shard(part, mesh=mesh)
    return module, hvd_dyncomp.fsdp.attach(module), lambda: None


FRONT_ENDS = {"ddp": with_ddp, "averager": with_averager, "fsdp": with_fsdp}


def new_module(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(63, 257), nn.Tanh(), nn.Linear(257, 11))


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs, classes = torch.randn(16, 63, generator=generator), torch.randint(11, (16,), generator=generator)
    return nn.functional.cross_entropy(model(inputs), classes)


def flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Of shards, the values of all ranks."""
    wholes = [tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for tensor in tensors]
    return torch.cat([tensor.detach().flatten() for tensor in wholes])


class Task:
    """A model that is trained, from values that `seed` gives."""

    def __init__(self, front_end: str, seed: int) -> None:
        levels = hvd_dyncomp.Schedule({0: 8, 1: 1})
        self.model, self.quantizer, self._average = FRONT_ENDS[front_end](new_module(seed), levels)
        self._optimizer = hvd_dyncomp.less_momentum(torch.optim.AdamW(self.model.parameters(), lr=0.01))

    def train(self, epoch: int) -> None:
        for step in range(STEPS * epoch, STEPS * (epoch + 1)):
            self._optimizer.zero_grad()
            loss_of(self.model, step, dist.get_rank()).backward()
            self._average()
            if epoch == 0:
                self._check_means(step)
            self._optimizer.step()
        self.quantizer.controller.step({"loss": 0.0})

    def _check_means(self, step: int) -> None:
        reference = new_module(0)
        nn.utils.vector_to_parameters(flat(self.model.parameters()), reference.parameters())
        size = dist.get_world_size()
        (sum(loss_of(reference, step, rank) for rank in range(size)) / size).backward()
        mean = flat(parameter.grad for parameter in self.model.parameters())
        right = flat(parameter.grad for parameter in reference.parameters())
        error = float((mean - right).norm() / right.norm())
        assert error < ERROR, f"the error of a mean is {error}"

    def check_replicas(self) -> None:
        mine = flat(self.model.parameters())
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine)
        assert all(torch.equal(other, mine) for other in everyone), "replicas differ"

    def state(self) -> tuple[Any, bytes]:
        file = io.BytesIO()
        own = {"quantizer": self.quantizer.state_dict(), "controller": self.quantizer.controller.state_dict()}
        torch.save(own, file)
        return copy.deepcopy((self.model.state_dict(), self._optimizer.state_dict())), file.getvalue()

    def load(self, state: tuple[Any, bytes]) -> None:
        (model, optimizer), file = state
        self.model.load_state_dict(model)
        self._optimizer.load_state_dict(optimizer)
        own = torch.load(io.BytesIO(file), weights_only=True)
        self.quantizer.controller.load_state_dict(own["controller"])
        self.quantizer.load_state_dict(own["quantizer"])


def train_and_resume(front_end: str) -> None:
    task = Task(front_end, seed=0)
    task.train(0)
    task.train(1)
    assert any(residual.any() for residual in task.quantizer.state_dict()["residuals"].values())
    state = task.state()
    task.train(2)
    task.check_replicas()
    again = Task(front_end, seed=1)  # what is loaded replaces all
    again.load(state)
    again.train(2)
    one, other = flat(task.model.parameters()), flat(again.model.parameters())
    assert torch.equal(one, other), "a resumed run has other bits"
    sent = again.quantizer.meter.total()
    assert sent.sent_bytes < 0.3 * sent.float32_bytes, "gradients were not compressed"


if __name__ == "__main__":
    dist.init_process_group("gloo")
    said = "trained"
    try:
        train_and_resume(sys.argv[1])
    except RuntimeError as error:
        said = str(error)
        if f"torch {torch.__version__} " not in said:
            raise
    if dist.get_rank() == 0:
        print(f"\nsaid: {said}\n", end="", flush=True)  # among what Gloo says
    dist.destroy_process_group()
