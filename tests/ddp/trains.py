"""Trains with DistributedDataParallel, and knows nothing of this package; test_run_under_torchrun.py has it do more."""

import atexit
import copy
import gc
import io
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # DDP imports it, too: from then on it would keep the group that there is then
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, row):
        return torch.full((64,), (row % 7) / 7)


def wrapped(net, does):
    if does == "fully-shard":
        from torch.distributed.fsdp import fully_shard

        return fully_shard(net)
    model = DistributedDataParallel(net)
    if does == "hook":
        model.register_comm_hook(None, fp16_compress_hook)
    if does == "copy":
        torch.save(model, io.BytesIO())
        model = copy.deepcopy(model)
    return model


def end(does):
    time.sleep(0.5 * dist.get_rank())  # torchrun ends the others, and rank 0 is to speak
    if does == "exit":
        sys.exit(3)
    if does == "raise":
        raise ValueError("its own error")
    if does == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
    if does == "fork" and os.fork() == 0:
        atexit.register(os._exit, 0)  # with torch alone, too, the destructor of the program's own Gloo group would hang
        sys.exit(0)


def main(does, steps):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = wrapped(torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)), does)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    context = "spawn" if does == "spawn" else None
    rows = iter(DataLoader(Rows(), 8, num_workers=1 if context else 0, multiprocessing_context=context))
    torch.manual_seed(dist.get_rank() + 1)
    with torch.no_grad():
        model(torch.randn(4, 64))
    for step in range(steps):
        optimizer.zero_grad()
        batch = next(rows) * torch.randn(8, 64) if context else torch.randn(8, 64)
        model(batch).square().mean().backward()
        optimizer.step()
        if step == 4:
            end(does)
    weights = torch.cat([one.detach().flatten() for one in model.parameters()])
    if does != "fully-shard":
        alike = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
        dist.all_gather(alike, weights)
        if dist.get_rank() == 0:
            print("weights", torch.equal(*alike), weights.double().sum().item())
    # torch holds the GIL while it deletes a Gloo group and joins its threads: one of them may still need the GIL to
    # forget the last collective, with torch alone, too.
    time.sleep(0.5)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
    # Gloo's threads end with the model; `destroy_process_group` alone leaves them running, and sometimes one of them
    # aborts the process while Python ends ("terminate called without an active exception").
    gc.collect()
