"""Saves after some steps, or loads what was saved then, and trains on.

Usage: continues.py save|load FOLDER RECIPE [RANKS]. RECIPE is a file with the functions save and load, which know this
program's model, optimizer and quantizer; RANKS, how many have saved, if they are not as many. Each rank prints
checksums of the whole parameters where it begins to train on, and of its shards and residuals at the end.
"""

import hashlib
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hvd_dyncomp
from hvd_dyncomp import Schedule, less_momentum

how, folder, recipe, *ranks = sys.argv[1:]
dist.init_process_group("gloo")
rank, replicas = dist.get_rank(), 2
hvd_dyncomp.fsdp.register_backend(Schedule({0: 1, 3: 4}), min_numel=300)
shape, override = (replicas, dist.get_world_size() // replicas), {"replicate": "hvd_dyncomp"}
mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"), backend_override=override)
torch.manual_seed(0 if how == "save" else 1)  # what is loaded replaces all
model = nn.Sequential(nn.Linear(31, 65), nn.Sequential(nn.Linear(65, 257), nn.Tanh()), nn.Linear(257, 3))
for module in (model[1], model):
    fully_shard(module, mesh=mesh)
optimizer = less_momentum(torch.optim.AdamW(model.parameters(), lr=0.01))
quantizer = hvd_dyncomp.fsdp.attach(model)
exec(Path(recipe).read_text(encoding="utf-8"))  # noqa: S102


def train(epochs: Iterable[int]) -> None:
    for epoch in epochs:
        torch.manual_seed(10 * epoch + rank)
        for _ in range(3):
            optimizer.zero_grad()
            for last in (False, True):
                model.set_requires_all_reduce(last)
                loss = nn.functional.cross_entropy(model(torch.randn(16, 31)), torch.randint(3, (16,)))
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        quantizer.controller.step({"train_loss": loss.item()})


def say(when: str, tensors: Iterable[torch.Tensor]) -> None:
    values = b"".join(tensor.detach().float().numpy().tobytes() for tensor in tensors)
    print(f"\nrank {rank} {when} {hashlib.sha256(values).hexdigest()}\n", end="", flush=True)


if how == "load":
    globals()["load"](folder, **({"ranks": int(ranks[0])} if ranks else {}))
else:
    train(range(2))
    globals()["save"](folder)
say("from", [parameter.full_tensor() for parameter in model.parameters()])
train(range(2, 4))
state = quantizer.state_dict()
assert quantizer.bits == 4 and any(each.any() for each in state["residuals"].values())
say("to", [*(parameter.to_local() for parameter in model.parameters()), *state["residuals"].values()])
dist.destroy_process_group()
