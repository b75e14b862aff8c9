"""Trains with Horovod, and knows nothing of this package."""

import sys

import horovod.torch as hvd
import torch

hvd.init()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
own = {"compression": hvd.Compression.fp16} if "own" in sys.argv else {}
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), **own)
torch.manual_seed(hvd.rank() + 1)
for _ in range(30):
    optimizer.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
weights = hvd.allgather(torch.cat([one.detach().flatten() for one in model.parameters()])[None])
if hvd.rank() == 0:
    sys.stdout.write(f"same weights: {torch.equal(*weights)}\n")
