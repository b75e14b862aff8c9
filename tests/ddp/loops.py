"""Loops of training, each with a model of its own; they know nothing of this package, and end with every launcher."""

import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

STEPS = 4


class Branches(nn.Module):
    """Each rank uses another part of it in its first step."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(64, 64) for _ in range(2)])

    def forward(self, values):
        return self.parts[dist.get_rank()](values)


class Checkpointed(nn.Module):
    """All of its gradients come in passes within the pass."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(64, 64) for _ in range(2)])

    def forward(self, values):
        values = values.requires_grad_()
        for part in self.parts:
            values = checkpoint(part, values, use_reentrant=True)
        return values


def model_of(net=None, **arguments):
    torch.manual_seed(0)
    return DistributedDataParallel(net or nn.Linear(64, 64), **arguments)


def backward(*models):
    loss = sum(model(torch.randn(4, 64)).square().mean() for model in models)
    loss.backward()


def train(*models, steps=STEPS):
    optimizer = torch.optim.SGD([one for model in models for one in model.parameters()], lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        backward(*models)
        optimizer.step()
    return models[0]


def looks():
    """One rank calls its untrained model in eval mode, with gradients."""
    model = model_of()
    if dist.get_rank() == 0:
        model.eval()
        model(torch.randn(2, 64)).sum().item()
        model.train()
    dist.barrier()
    return train(model)


def looks_in_training_mode():
    model = model_of()
    if dist.get_rank() == 1:
        model(torch.randn(2, 64)).sum().item()
    dist.barrier()
    return train(model)


def trains_in_eval_mode():
    return train(model_of().eval())


def is_late():
    """One rank begins to train later than `run` waits for it."""
    if dist.get_rank() == 1:
        time.sleep(12)
    return train(model_of())


def accumulates():
    """The first passes reduce nothing."""
    model = model_of()
    for _ in range(2):
        with model.no_sync():
            backward(model)
    return train(model)


def uses_other_parts():
    return train(model_of(Branches(), find_unused_parameters=True))


def checkpoints():
    return train(model_of(Checkpointed()))


def checkpoints_with_static_graph():
    return train(model_of(Checkpointed(), static_graph=True))


def trains_two():
    """Two models in one backward pass."""
    return train(model_of(), model_of())


def makes_groups():
    """One group of all ranks, and one for each."""
    single = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    train(model_of(process_group=single))
    return train(model_of(process_group=dist.new_group()))


def has_no_batch():
    """One rank is in `join` without a batch in the first steps."""
    model = model_of()
    with model.join():
        train(model, steps=0 if dist.get_rank() else 4)
    return train(model)


def main(names):
    dist.init_process_group("gloo")
    for name in names:
        model = globals()[name]()
        weights = torch.cat([one.detach().flatten() for one in model.parameters()])
        alike = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
        dist.all_gather(alike, weights)
        if dist.get_rank() == 0:
            sys.stdout.write(f"{name}: {torch.equal(*alike)}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
