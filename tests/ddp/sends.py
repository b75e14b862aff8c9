"""Prints the bytes of a step by the meter and by the network interface. Usage: sends.py LEVEL,..."""

import itertools
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hvd_dyncomp import Schedule, ddp

COUNTER = Path("/sys/class/net/eth0/statistics/tx_bytes")
VALUES, STEPS = 2**22, 3  # of each of two tensors


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pair = torch.nn.ParameterList(torch.zeros(VALUES) for _ in range(2))

    def forward(self, wanted: torch.Tensor) -> torch.Tensor:
        return sum((parameter * wanted).sum() for parameter in self.pair)


dist.init_process_group("gloo")
levels = [float(bits) for bits in sys.argv[1].split(",")]
model = DistributedDataParallel(Model())
quantizer = ddp.compress(model, Schedule(dict(enumerate(levels))))
wanted = torch.randn(VALUES, generator=torch.Generator().manual_seed(dist.get_rank()))


def sent() -> int:
    dist.barrier()
    time.sleep(0.1)  # what is sent may still be in the kernel
    return int(COUNTER.read_text())


for bits in levels:
    model(wanted).backward()
    before, counted = sent(), quantizer.meter.level(bits).leaving_bytes
    taken = [before]
    for _ in range(STEPS):
        model(wanted).backward()
        taken.append(sent())
    counted = (quantizer.meter.level(bits).leaving_bytes - counted) / STEPS
    # The least of the steps: on a busy machine TCP now and then sends a segment again that was only late.
    report = {"bits": bits, "host": os.environ["GROUP_RANK"], "counted": counted}
    report["sent"] = min(b - a for a, b in itertools.pairwise(taken))
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, report)
    if dist.get_rank() == 0:
        print("REPORTS " + json.dumps(everyone), flush=True)
    quantizer.controller.step({})
dist.destroy_process_group()
