"""A program whose last rank is killed in the middle of a run, while the others wait for it. Usage: dies.py [FOLDER]

HVD_DYNCOMP_TEST_DEVICE and HVD_DYNCOMP_TEST_BACKEND are as in process_group.py; over NCCL torchrun ends the others.

With a folder, that rank has workers of a DataLoader, from before and after compress, which are busy for longer than
the others wait. They leave their process ids in the folder, and end when a rank that has noticed ends them.
"""

import os
import signal
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from hvd_dyncomp import ddp


class Busy(Dataset):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        if index > 1:
            (self.folder / str(os.getpid())).touch()
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


device, nccl = os.environ.get("HVD_DYNCOMP_TEST_DEVICE", "cpu"), os.environ.get("HVD_DYNCOMP_TEST_BACKEND") == "nccl"
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
if not nccl:
    # torchrun ends the others as soon as it has seen that one is gone; here they are to notice it themselves.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
# torchrun kills the others after 30 s.
dist.init_process_group("cpu:gloo,cuda:nccl" if nccl else "gloo", timeout=timedelta(seconds=20))
rank, last = dist.get_rank(), dist.get_world_size() - 1
folder = Path(sys.argv[1]) if sys.argv[1:] else None
model = DistributedDataParallel(nn.Linear(64, 64).to(device), process_group=dist.new_group())
ddp.transport()  # of another group, which is there before any worker
kept = [workers(folder) if rank == last else None]
ddp.compress(model, 4)
kept.append(workers(folder) if rank == last else None)
for step in range(100):
    loss = model(torch.randn(8, 64, device=device)).sum()
    if step == 3 and rank == last:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        loss.backward()
    except (ConnectionError, TimeoutError) as error:
        print(f"rank {rank} in step {step} after {time.monotonic() - began:.0f} s: {error}", flush=True)
        for worker in [] if folder is None else folder.iterdir():
            with suppress(ProcessLookupError):  # another rank has ended it
                os.kill(int(worker.name), signal.SIGKILL)
        os._exit(7)  # rather than to wait for the workers
