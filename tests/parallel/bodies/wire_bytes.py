"""Prints, for every level, the bytes of a step by the meter and by the network interface.

Run on two hosts, not by pytest. Usage: wire_bytes.py VALUES STEPS
"""

import itertools
import json
import sys
import time
from pathlib import Path

import horovod.torch as hvd
import torch

from hvd_dyncomp import LEVELS, Controller, DynamicQuantizer, Schedule
from hvd_dyncomp.transport.horovod import gather_json

COUNTER = Path("/sys/class/net/eth0/statistics/tx_bytes")


def main() -> None:
    values, steps = int(sys.argv[1]), int(sys.argv[2])
    hvd.init()
    torch.set_num_threads(1)
    parameters = [torch.nn.Parameter(torch.zeros(values // 4)) for _ in range(4)]
    generator = torch.Generator().manual_seed(hvd.rank())
    wanted = [torch.randn(p.shape, generator=generator) for p in parameters]
    controller = Controller(Schedule(dict(enumerate(LEVELS))))
    q = DynamicQuantizer(controller)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), compression=q)

    def step() -> None:
        optimizer.zero_grad()
        torch.stack([(p * w).sum() for p, w in zip(parameters, wanted, strict=True)]).sum().backward()
        optimizer.synchronize()

    def sent_so_far() -> int:
        hvd.barrier()
        time.sleep(0.1)  # what is done for Horovod may still be in the kernel's send buffer
        return int(COUNTER.read_text())

    for bits in LEVELS:
        step()  # Horovod negotiates new tensors once
        sent, counted = [sent_so_far()], [q.meter.level(bits).sent_bytes]
        for _ in range(steps):
            step()
            sent.append(sent_so_far())
            counted.append(q.meter.level(bits).sent_bytes)
        # The least of the steps: on a busy machine TCP now and then sends a segment again that was only late.
        report = {"bits": bits, "rank": hvd.rank(), "sent": least_step(sent), "counted": least_step(counted)}
        everyone = gather_json(report, "reports")
        if hvd.rank() == 0:
            print("REPORTS " + json.dumps(everyone), flush=True)
        controller.step({})


def least_step(counter: list[float]) -> float:
    return min(b - a for a, b in itertools.pairwise(counter))


if __name__ == "__main__":
    main()
