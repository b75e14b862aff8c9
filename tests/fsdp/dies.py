"""A program whose last rank is killed in the middle of backward, after a module has begun to travel."""

import os
import signal
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hvd_dyncomp import fsdp


def dies(*arguments) -> None:
    print(f"dies at {time.time()}", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


dist.init_process_group("gloo")
rank, last = dist.get_rank(), dist.get_world_size() - 1
fsdp.register_backend(4)
shape, override = (2, (last + 1) // 2), {"replicate": "hvd_dyncomp"}
mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"), backend_override=override)
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)))
for module in (*model, model):
    fully_shard(module, mesh=mesh)
fsdp.attach(model)
for step in range(100):
    if step == 3 and rank == last:
        model[1].register_full_backward_hook(dies)
    model(torch.randn(8, 64)).sum().backward()
