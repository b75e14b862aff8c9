"""A program whose last rank dies in a step, while the others wait for it. Usage: dies.py killed|fails [FOLDER]

HVD_DYNCOMP_TEST_DEVICE and HVD_DYNCOMP_TEST_BACKEND are as in process_group.py.

With a folder, that rank has workers of a DataLoader, from before and after compress, which are busy for longer than
the job may take to end. They leave their process ids in the folder.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from hvd_dyncomp import ddp
from hvd_dyncomp.exchange.step import Step


class Busy(Dataset):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        if index > 1:
            (self.folder / str(os.getpid())).touch()
            for stream in (1, 2):  # who reads the job's output would wait for this worker, too
                os.close(stream)
            time.sleep(60)
        return torch.zeros(1)


def workers(folder: Path | None):
    """One that has begun; it is busy when this returns."""
    if folder is None:
        return None
    known = len(list(folder.iterdir()))
    loader = DataLoader(Busy(folder), num_workers=1, persistent_workers=True, multiprocessing_context="fork")
    iterator = iter(loader)
    next(iterator)
    while len(list(folder.iterdir())) == known:
        time.sleep(0.01)
    return iterator


def dies(*arguments) -> None:
    print(f"dies at {time.time()}", flush=True)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise MemoryError("no room")


device, nccl = os.environ.get("HVD_DYNCOMP_TEST_DEVICE", "cpu"), os.environ.get("HVD_DYNCOMP_TEST_BACKEND") == "nccl"
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
dist.init_process_group("cpu:gloo,cuda:nccl" if nccl else "gloo")
rank, last = dist.get_rank(), dist.get_world_size() - 1
how, folder = sys.argv[1], Path(sys.argv[2]) if sys.argv[2:] else None
model = DistributedDataParallel(nn.Linear(64, 64).to(device), process_group=dist.new_group())
ddp.transport()  # of another group, which is there before any worker
kept = [workers(folder) if rank == last else None]
ddp.compress(model, 4)
kept.append(workers(folder) if rank == last else None)
for step in range(100):
    if step == 3 and rank == last:
        Step.add = dies
    model(torch.randn(8, 64, device=device)).sum().backward()
