"""A level that follows the rate of the link: torchrun --nproc-per-node 2 ddp_link_aware.py"""

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import hvd_dyncomp

dist.init_process_group("gloo")
network = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
model = DistributedDataParallel(network, bucket_cap_mb=8, gradient_as_bucket_view=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.0002)
quantizer = hvd_dyncomp.ddp.compress(model, hvd_dyncomp.LinkAware(levels=(4, 8, 16, 32)))

for epoch in range(6):
    for _ in range(50):
        inputs, labels = torch.randn(500, 64), torch.randint(10, (500,))
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    quantizer.controller.step({"waited": quantizer.meter.waited()})  # on every rank
    if dist.get_rank() == 0:
        record = quantizer.controller.history[-1]
        print(f"epoch {epoch}: {record.reason}; next: {record.bits} bits")
dist.destroy_process_group()
