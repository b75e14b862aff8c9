"""A GAN, with two averagers: `torchrun --nproc-per-node 2 docs/examples/loop_gan.py [LEVEL]`."""

import sys

import torch
import torch.distributed as dist
from torch.nn import LeakyReLU, Linear, Sequential
from torch.nn.functional import softplus

import hvd_dyncomp

LEVEL = float(sys.argv[1]) if sys.argv[1:] else 4
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)  # the same models on every rank
networks = [[Linear(n, 128), LeakyReLU(0.2), Linear(128, 128), LeakyReLU(0.2), Linear(128, 1)] for n in (4, 1)]
generator, discriminator = models = [Sequential(*layers) for layers in networks]
averagers = [hvd_dyncomp.Averager(model.named_parameters(), LEVEL) for model in models]  # in one order on all ranks
optimizers = [torch.optim.Adam(model.parameters(), lr=5e-4, betas=(0.5, 0.9)) for model in models]


def update(number, loss):
    for model in models:
        model.zero_grad()  # the generator's loss leaves gradients in the discriminator, too
    loss.backward()
    # This model's alone: a mean that nobody uses takes along what its residuals owe to later steps.
    averagers[number].mean_([parameter.grad for parameter in models[number].parameters()])
    optimizers[number].step()


torch.manual_seed(1 + rank)
for _ in range(300):
    real = torch.randn(128, 1) + (rank % 2 * 2 - 1)  # about -1 on some ranks, about 1 on the others
    made = generator(torch.randn(128, 4))
    update(1, (softplus(-discriminator(real)) + softplus(discriminator(made.detach()))).mean())
    update(0, softplus(-discriminator(made)).mean())
made, sent = generator(torch.randn(10_000, 4)), [averager.meter.total() for averager in averagers]
if rank == 0:
    print(f"made {made.mean():.2f} +- {made.std():.2f}, real 0.00 +- 1.41")
    print(f"{sum(s.sent_bytes for s in sent) / sum(s.float32_bytes for s in sent):.4f} of the bytes of float32")
dist.destroy_process_group()
