"""A complete training with DistributedDataParallel: torchrun --nproc-per-node 2 train_ddp.py"""

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hvd_dyncomp

dist.init_process_group("gloo")
torch.manual_seed(0)  # the same made-up data on every rank
rows = torch.randn(5000, 32)
classes = rows[:, :10].argmax(dim=1)
train = TensorDataset(rows[:4000], classes[:4000])
sampler = DistributedSampler(train)  # each rank trains on its part
loader = DataLoader(train, batch_size=50, sampler=sampler)
network = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
model = DistributedDataParallel(network, bucket_cap_mb=8, gradient_as_bucket_view=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
quantizer = hvd_dyncomp.ddp.compress(model, 4)  # the line that compresses

for epoch in range(5):
    sampler.set_epoch(epoch)
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        outputs = network(rows[4000:])  # held-out data
        validation_loss = cross_entropy(outputs, classes[4000:])
        accuracy = (outputs.argmax(dim=1) == classes[4000:]).float().mean()
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: validation loss {validation_loss:.3f}, accuracy {accuracy:.3f}")

quantizer.check_replicas()  # on every rank: raises an error if the ranks hold different models
if dist.get_rank() == 0:
    sent = quantizer.meter.total()
    print(
        f"rank 0 sent {sent.sent_bytes / 1e6:.2f} MB instead of {sent.float32_bytes / 1e6:.2f} MB: "
        f"{sent.saved_fraction:.1%} saved"
    )
dist.destroy_process_group()
