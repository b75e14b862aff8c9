"""Gradients, without DDP's wrapper: `torchrun --nproc-per-node 2 docs/examples/loop_plain.py [LEVEL [SEED]]`."""

import sys

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import hvd_dyncomp

LEVEL = float(sys.argv[1]) if sys.argv[1:] else 4
SEED = int(sys.argv[2]) if sys.argv[2:] else 0
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(100 * SEED + rank + 1)
rows = torch.randn(512 + 40 * rank, 32)  # another shard on every rank, and some have more batches
classes = rows[:, :10].argmax(dim=1)
model = torch.nn.Sequential(torch.nn.Linear(32, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 10))
for value in model.state_dict().values():
    dist.broadcast(value, src=0)  # the averager broadcasts nothing
# At 2 bits and less much momentum may harm.
optimizer = hvd_dyncomp.less_momentum(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
averager = hvd_dyncomp.Averager(model.named_parameters(), LEVEL)  # or a policy
batches = torch.tensor(len(rows) // 32)
dist.all_reduce(batches, dist.ReduceOp.MIN)  # mean_ waits for all ranks, so all take as many steps
for _ in range(25):
    for batch in torch.randperm(len(rows)).split(32)[:batches]:
        optimizer.zero_grad()
        loss = cross_entropy(model(rows[batch]), classes[batch])
        loss.backward()
        averager.mean_([parameter.grad for parameter in model.parameters()])
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1)  # the mean's, which all ranks clip alike
        optimizer.step()
    averager.controller.step({"train_loss": loss})  # where a policy decides, and replicas are compared
rows, sent = torch.randn(10_000, 32), averager.meter.total()
classes, scores = rows[:, :10].argmax(dim=1), model(rows)
if rank == 0:
    print(f"loss {cross_entropy(scores, classes):.3f}, accuracy {(scores.argmax(dim=1) == classes).float().mean():.3f}")
    print(f"{sent.sent_bytes / sent.float32_bytes:.4f} of the bytes of float32")
dist.destroy_process_group()
