"""A complete run with Accelerate, which resumes: torchrun --nproc-per-node 2 ddp_accelerate.py"""

import glob
import os

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, DistributedDataParallelKwargs, set_seed
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import hvd_dyncomp

accelerator = Accelerator(
    cpu=not torch.cuda.is_available(),
    mixed_precision="no",  # or "bf16"
    gradient_accumulation_steps=2,
    dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    kwargs_handlers=[DistributedDataParallelKwargs(bucket_cap_mb=8, gradient_as_bucket_view=True)],
)
set_seed(0)
rows = torch.randn(768, 32)
classes = rows[:, :4].argmax(1)
loader = DataLoader(TensorDataset(rows[:512], classes[:512]), batch_size=16, shuffle=True)
unseen = DataLoader(TensorDataset(rows[512:], classes[512:]), batch_size=64)
model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.ReLU(), torch.nn.Linear(256, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
# hvd_dyncomp.less_momentum(optimizer)  # 2 bits and less; before the scheduler
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
model, optimizer, loader, unseen, scheduler = accelerator.prepare(model, optimizer, loader, unseen, scheduler)
quantizer = hvd_dyncomp.ddp.compress(model, 4)
accelerator.register_for_checkpointing(hvd_dyncomp.AllRanks(quantizer))

if checkpoints := sorted(glob.glob("run/epoch-*")):
    accelerator.load_state(checkpoints[-1])
for epoch in range(quantizer.controller.epoch, 4):
    model.train()
    loader.set_epoch(epoch)
    for inputs, labels in loader:
        with accelerator.accumulate(model):
            loss = cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        right = [(model(inputs).argmax(1) == labels).float().mean() for inputs, labels in unseen]
    quantizer.controller.step({"val_accuracy": sum(right) / len(right), "train_loss": loss.detach()})
    accelerator.save_state("run/saving")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        os.replace("run/saving", f"run/epoch-{epoch:04}")  # whole, or not there
    accelerator.wait_for_everyone()
accelerator.print(f"{quantizer.meter.total().saved_fraction:.0%} of the bytes saved")
