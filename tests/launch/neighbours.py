"""Says where ranks are and what their transfers put on the interface. Run on hosts, not by pytest.

Usage: neighbours.py FILE NBYTES. Rank 0 writes FILE: JSON, for each rank where it is, and the bytes that its host's
interface sent while every rank sent NBYTES to each of its neighbours ("inside"), and to each rank of other hosts
("across").
"""

import json
import socket
import sys
import time
from pathlib import Path

import horovod.torch as hvd
import torch

from hvd_dyncomp.transport.base import gather_json
from hvd_dyncomp.transport.horovod import HorovodTransport

COUNTER = Path("/sys/class/net/eth0/statistics/tx_bytes")


def sent_so_far() -> int:
    hvd.barrier()
    time.sleep(0.1)  # what is done for Horovod may still be in the kernel's send buffer
    return int(COUNTER.read_text())


def sent_to(receivers: list[bool], nbytes: int) -> int:
    splits = torch.tensor([nbytes if receives else 0 for receives in receivers], dtype=torch.int32)
    before = sent_so_far()
    hvd.alltoall(torch.zeros(int(splits.sum()), dtype=torch.uint8), splits, name="bytes")
    return sent_so_far() - before


def main() -> None:
    path, nbytes = Path(sys.argv[1]), int(sys.argv[2])
    hvd.init()
    hosts = gather_json(HorovodTransport(), hvd.cross_rank(), "hosts")
    here = [host == hvd.cross_rank() for host in hosts]
    others = [rank != hvd.rank() for rank in range(hvd.size())]
    report = {
        "rank": hvd.rank(),
        "local": [hvd.local_rank(), hvd.local_size()],
        "cross": [hvd.cross_rank(), hvd.cross_size()],
        "host": socket.gethostname(),
        "inside": sent_to([a and b for a, b in zip(here, others, strict=True)], nbytes),
        "across": sent_to([not a for a in here], nbytes),
    }
    everyone = gather_json(HorovodTransport(), report, "reports")
    if hvd.rank() == 0:
        path.write_text(json.dumps(everyone))


if __name__ == "__main__":
    main()
