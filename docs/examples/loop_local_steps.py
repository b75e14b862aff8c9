"""Local steps (DiLoCo): `torchrun --nproc-per-node 2 docs/examples/loop_local_steps.py [LEVEL [SEED]]`."""

import copy
import sys

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import hvd_dyncomp

LEVEL = float(sys.argv[1]) if sys.argv[1:] else 4
SEED = int(sys.argv[2]) if sys.argv[2:] else 0
LOCAL_STEPS = 8
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(100 * SEED + rank + 1)
rows = torch.randn(512 + 40 * rank, 32)  # another shard on every rank
classes = rows[:, :10].argmax(dim=1)
torch.manual_seed(SEED)  # the same model on every rank
shared = torch.nn.Sequential(torch.nn.Linear(32, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 10))
model = copy.deepcopy(shared)  # this rank's own
inner = torch.optim.SGD(model.parameters(), lr=0.05)  # or AdamW; its state stays on its rank
outer = torch.optim.SGD(shared.parameters(), lr=0.7, momentum=0.9, nesterov=True)
averager = hvd_dyncomp.Averager(shared.named_parameters(), LEVEL)
for _ in range(50):
    model.load_state_dict(shared.state_dict())
    for batch in torch.randint(len(rows), (LOCAL_STEPS, 32)):
        inner.zero_grad()
        cross_entropy(model(rows[batch]), classes[batch]).backward()
        inner.step()
    for start, now in zip(shared.parameters(), model.parameters(), strict=True):
        start.grad = start.detach() - now.detach()  # the change, because residuals make up for errors of changes
    averager.mean_([parameter.grad for parameter in shared.parameters()])
    outer.step()
rows, sent = torch.randn(10_000, 32), averager.meter.total()
classes, scores = rows[:, :10].argmax(dim=1), shared(rows)
if rank == 0:
    print(f"loss {cross_entropy(scores, classes):.3f}, accuracy {(scores.argmax(dim=1) == classes).float().mean():.3f}")
    print(f"{sent.sent_bytes / sent.float32_bytes / LOCAL_STEPS:.4f} of the bytes of float32 in every step")
dist.destroy_process_group()
