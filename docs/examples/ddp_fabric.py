"""A complete run with Fabric, which resumes: torchrun --nproc-per-node 2 ddp_fabric.py"""

import os

import lightning as L
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from hvd_dyncomp import AllRanks
from hvd_dyncomp.ddp import compress

fabric = L.Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
fabric.seed_everything(0)
rows = torch.randn(2560, 64)
labels = rows[:, :10].argmax(dim=1)
data = TensorDataset(rows[:2048], labels[:2048])
held_out = fabric.to_device((rows[2048:], labels[2048:]))
sampler = DistributedSampler(data, fabric.world_size, fabric.global_rank)
batches = DataLoader(data, 32, sampler=sampler)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
quantizer = compress(model, 4)

state = {"model": model, "optimizer": optimizer, "quantizer": AllRanks(quantizer), "epoch": 0}
if os.path.exists("last.ckpt"):
    fabric.load("last.ckpt", state)

for epoch in range(state["epoch"], 4):
    sampler.set_epoch(epoch)
    losses = []
    for step, batch in enumerate(batches):
        inputs, classes = fabric.to_device(batch)
        accumulates = step % 2 == 0
        with fabric.no_backward_sync(model, enabled=accumulates):
            loss = cross_entropy(model(inputs), classes)
            fabric.backward(loss / 2)
        if not accumulates:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    with torch.no_grad():
        accuracy = (model(held_out[0]).argmax(dim=1) == held_out[1]).float().mean()
    quantizer.controller.step({"val_accuracy": accuracy, "train_loss": torch.stack(losses).mean()})  # on every rank
    state["epoch"] = epoch + 1
    fabric.save("next.ckpt", state)  # on every rank
    fabric.barrier()
    if fabric.is_global_zero:
        os.replace("next.ckpt", "last.ckpt")

if fabric.is_global_zero:
    print(f"{quantizer.meter.total().saved_fraction:.0%} of the bytes saved, now at {quantizer.bits} bits")
