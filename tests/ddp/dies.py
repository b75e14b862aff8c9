"""A program whose last rank is killed in the middle of a run, while the others wait for it."""

import os
import signal
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hvd_dyncomp import ddp

# torchrun ends the others as soon as it has seen that one is gone; here they are to notice it themselves.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
dist.init_process_group("gloo")
last = dist.get_rank() == dist.get_world_size() - 1
model = DistributedDataParallel(nn.Linear(64, 64), process_group=dist.new_group())
ddp.compress(model, 4)
for step in range(100):
    loss = model(torch.randn(8, 64)).sum()
    if step == 3 and last:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        loss.backward()
    except ConnectionError as error:
        print(f"rank {dist.get_rank()} in step {step}: {error}", flush=True)
        sys.exit(7)
