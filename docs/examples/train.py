"""A complete training: a small classifier of made-up data, whose gradients travel at 4 bits per value.

    horovodrun -np 2 python train.py

The other examples start these functions under Slurm, Kubernetes, Ray and Spark.
"""

import argparse
import hashlib
import json

import horovod.torch as hvd
import torch
from torch.nn.functional import cross_entropy

from hvd_dyncomp import DynamicQuantizer

FEATURES, CLASSES, BATCH = 32, 10, 64


def made_up_data(samples, seed):
    """Random rows, and the classes that one fixed linear map gives them: float32 (samples, 32) and int64 (samples,)."""
    teacher = torch.randn(FEATURES, CLASSES, generator=torch.Generator().manual_seed(0))
    rows = torch.randn(samples, FEATURES, generator=torch.Generator().manual_seed(seed))
    return rows, (rows @ teacher).argmax(1)


def build():
    """A model, its quantizer, and Horovod's optimizer with it."""
    model = torch.nn.Sequential(torch.nn.Linear(FEATURES, 256), torch.nn.ReLU(), torch.nn.Linear(256, CLASSES))
    quantizer = DynamicQuantizer(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.04, momentum=0.9)
    named = model.named_parameters()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=quantizer)
    quantizer.attach(optimizer)  # compress from the first step on
    return model, quantizer, optimizer


def train_one_epoch(model, optimizer, controller):
    """Trains on this rank's rows, validates on its others, and has the controller compare the ranks' models."""
    rows, classes = made_up_data(2048, seed=1 + hvd.rank())
    for batch in torch.randperm(len(rows)).split(BATCH):
        optimizer.zero_grad()
        loss = cross_entropy(model(rows[batch]), classes[batch])
        loss.backward()
        optimizer.step()
    rows, classes = made_up_data(512, seed=1001 + hvd.rank())
    with torch.no_grad():
        accuracy = (model(rows).argmax(1) == classes).float().mean()
    # Every rank, after every epoch. With Controller(StepFunction()) in place of 4, rank 0 would now choose a level.
    controller.step({"val_accuracy": accuracy, "train_loss": loss.detach()}, num_samples=len(rows))


def report(model, quantizer):
    """What this rank has seen, as plain data."""
    total, history = quantizer.meter.total(), quantizer.controller.history
    values = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    return {
        "rank": hvd.rank(),
        "size": hvd.size(),
        "accuracy": round(history[-1].metrics["val_accuracy"], 3),
        "levels": [record.bits for record in history],
        "sent": f"{1 - total.saved_fraction:.0%} of float32",
        "steps": quantizer.state_dict()["steps"],
        "parameters": hashlib.sha256(values).hexdigest()[:16],  # the same on all ranks
    }


def train(epochs=6):
    """Trains on every rank; returns what this one saw."""
    hvd.init()
    model, quantizer, optimizer = build()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for _ in range(epochs):
        train_one_epoch(model, optimizer, quantizer.controller)
    return report(model, quantizer)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=6)
    print(json.dumps(train(parser.parse_args().epochs)), flush=True)
