"""Prints the bytes of a step by the meter and by the network interface. Usage: sends.py ddp|fsdp LEVEL,..."""

import itertools
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hvd_dyncomp import Schedule, ddp, fsdp
from hvd_dyncomp.commands.run.leaving import leaving
from hvd_dyncomp.exchange.topology import Topology

COUNTER = Path("/sys/class/net/eth0/statistics/tx_bytes")
VALUES, STEPS = 2**22, 3  # of each of two tensors


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pair = torch.nn.ParameterList(torch.zeros(VALUES) for _ in range(2))

    def forward(self, wanted: torch.Tensor) -> torch.Tensor:
        return sum((parameter * wanted).sum() for parameter in self.pair)


kind, levels = sys.argv[1], [float(bits) for bits in sys.argv[2].split(",")]
dist.init_process_group("gloo")
schedule = Schedule(dict(enumerate(levels)))
if kind == "ddp":
    model = DistributedDataParallel(Model())
    quantizer = ddp.compress(model, schedule)
    rank, topology = dist.get_rank(), Topology.of(ddp.transport().hosts())
else:  # each host has all values, in shards
    fsdp.register_backend(schedule)
    shape, override = (2, dist.get_world_size() // 2), {"replicate": "hvd_dyncomp"}
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"), backend_override=override)
    model = fully_shard(Model(), mesh=mesh)
    quantizer = fsdp.attach(model)
    rank, topology = mesh["replicate"].get_local_rank(), Topology.one_rank_per_host(2)
wanted = torch.randn(VALUES, generator=torch.Generator().manual_seed(dist.get_rank()))


def sent() -> int:
    dist.barrier()
    time.sleep(0.1)  # what is sent may still be in the kernel
    return int(COUNTER.read_text())


def left(bits: float) -> float:
    """What has left the host, by the meter."""
    return leaving(quantizer.meter.level(bits), bits, topology, rank)[0]


def step() -> None:
    model.zero_grad()
    model(wanted).backward()


for bits in levels:
    step()
    before, counted = sent(), left(bits)
    taken = [before]
    for _ in range(STEPS):
        step()
        taken.append(sent())
    counted = (left(bits) - counted) / STEPS
    # The least of the steps: on a busy machine TCP now and then sends a segment again that was only late.
    report = {"bits": bits, "host": os.environ["GROUP_RANK"], "counted": counted}
    report["sent"] = min(b - a for a, b in itertools.pairwise(taken))
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, report)
    if dist.get_rank() == 0:
        print("REPORTS " + json.dumps(everyone), flush=True)
    quantizer.controller.step({})
dist.destroy_process_group()
