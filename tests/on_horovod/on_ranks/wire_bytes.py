"""Prints, for sizes of a model and levels, the bytes of a step by the meter and by the network interface.

Run on hosts, not by pytest. Usage: wire_bytes.py VALUES[,VALUES...] STEPS [BITS,...]; all levels if none are named.
"""

import itertools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import horovod.torch as hvd
import torch

from hvd_dyncomp import LEVELS, Controller, DynamicQuantizer, Schedule
from hvd_dyncomp.commands.run.leaving import leaving
from hvd_dyncomp.exchange.topology import Topology
from hvd_dyncomp.transport.base import gather_json
from hvd_dyncomp.transport.horovod import HorovodTransport

COUNTER = Path("/sys/class/net/eth0/statistics/tx_bytes")


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    levels = [float(bits) for bits in sys.argv[3].split(",")] if len(sys.argv) > 3 else LEVELS
    for values in sys.argv[1].split(","):
        measure(int(values), int(sys.argv[2]), levels)


def measure(values: int, steps: int, levels: Sequence[float]) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(values // 4)) for _ in range(4)]
    generator = torch.Generator().manual_seed(hvd.rank())
    wanted = [torch.randn(p.shape, generator=generator) for p in parameters]
    controller = Controller(Schedule(dict(enumerate(levels))))
    q = DynamicQuantizer(controller)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters, lr=1.0),
        named_parameters=[(f"{values}.{number}", p) for number, p in enumerate(parameters)],
        compression=q,
    )

    def step() -> None:
        optimizer.zero_grad()
        torch.stack([(p * w).sum() for p, w in zip(parameters, wanted, strict=True)]).sum().backward()
        optimizer.synchronize()

    def sent_so_far() -> int:
        hvd.barrier()
        time.sleep(0.1)  # what is done for Horovod may still be in the kernel's send buffer
        return int(COUNTER.read_text())

    for bits in levels:
        step()  # Horovod negotiates new tensors once
        sent, counted = [sent_so_far()], [counts(q, bits)]
        for _ in range(steps):
            step()
            sent.append(sent_so_far())
            counted.append(counts(q, bits))
        # The least of the steps: on a busy machine TCP now and then sends a segment again that was only late.
        report = {"values": values, "bits": bits, "rank": hvd.rank(), "host": hvd.cross_rank()}
        report |= {"local_rank": hvd.local_rank(), "sent": least_step(sent)}
        report |= {name: least_step([count[name] for count in counted]) for name in counted[0]}
        everyone = gather_json(HorovodTransport(), report, "reports")
        if hvd.rank() == 0:
            print("REPORTS " + json.dumps(everyone), flush=True)
        controller.step({})


def counts(q: DynamicQuantizer, bits: float) -> dict[str, float]:
    """What the meter has counted so far: all that this worker sent, and what of it has left its host."""
    traffic = q.meter.level(bits)
    hosts = gather_json(HorovodTransport(), hvd.cross_rank(), "hosts")
    return {"counted": traffic.sent_bytes, "leaving": leaving(traffic, bits, Topology.of(hosts), hvd.rank())[0]}


def least_step(counter: list[float]) -> float:
    return min(b - a for a, b in itertools.pairwise(counter))


if __name__ == "__main__":
    main()
