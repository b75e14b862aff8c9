"""A complete run with torch alone, which resumes: torchrun --nproc-per-node 2 ddp_torch.py"""

import contextlib
import os

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hvd_dyncomp

dist.init_process_group("gloo")
torch.manual_seed(0)
rows = torch.randn(768, 32)
classes = rows[:, :4].argmax(1)
data = TensorDataset(rows[:512], classes[:512])
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=16, sampler=sampler)
network = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.ReLU(), torch.nn.Linear(256, 4))
model = DistributedDataParallel(network, bucket_cap_mb=8, gradient_as_bucket_view=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
# hvd_dyncomp.less_momentum(optimizer)  # 2 bits and less; before the scheduler
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
quantizer = hvd_dyncomp.ddp.compress(model, 4)
parts = {"model": network, "optimizer": optimizer, "scheduler": scheduler, "quantizer": hvd_dyncomp.AllRanks(quantizer)}

if os.path.exists("checkpoint.pt"):
    saved = torch.load("checkpoint.pt", weights_only=True, map_location="cpu")
    for name, part in parts.items():
        part.load_state_dict(saved[name])
for epoch in range(quantizer.controller.epoch, 4):
    sampler.set_epoch(epoch)
    for number, (inputs, labels) in enumerate(loader):
        steps = number % 2 == 1  # every second pass
        with contextlib.nullcontext() if steps else model.no_sync():
            with torch.autocast("cpu", torch.bfloat16, enabled=False):
                loss = cross_entropy(model(inputs), labels)
            (loss / 2).backward()
        if steps:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    with torch.no_grad():
        accuracy = (network(rows[512:]).argmax(1) == classes[512:]).float().mean()
    quantizer.controller.step({"val_accuracy": accuracy, "train_loss": loss.detach()})
    state = {name: part.state_dict() for name, part in parts.items()}  # on every rank
    if dist.get_rank() == 0:
        torch.save(state, "checkpoint.new.pt")
        os.replace("checkpoint.new.pt", "checkpoint.pt")
        print(f"epoch {epoch}: loss {loss:.3f}, accuracy {accuracy:.3f}")
if dist.get_rank() == 0:
    print(f"{quantizer.meter.total().saved_fraction:.0%} of the bytes saved")
dist.destroy_process_group()
