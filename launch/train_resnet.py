"""Trains a ResNet on several workers while a controller moves the bit-width of the gradients.

Examples:
    horovodrun -np 2 python launch/train_resnet.py
    mpirun -np 2 python launch/train_resnet.py --levels 1,2,4
    torchrun --nproc-per-node 2 launch/train_resnet.py
    python launch/train_resnet.py --help
"""

from __future__ import annotations

import argparse
import math
import platform
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function
from torch.utils.data import DataLoader

from common.device import choose, nccl_refuses
from hvd_dyncomp import Controller, ddp, less_momentum
from hvd_dyncomp.commands import ranks
from hvd_dyncomp.diagnostics import relative_errors
from train import checkpoint, data, options
from train.job import Job
from train.metrics import Log, Score, bytes_of_epoch, errors_over_ranks, without_nan
from train.models import build_model
from train.profiling import profile_of_steps

Forward = Callable[[torch.Tensor], torch.Tensor]


def main() -> None:
    if {"-h", "--help"} & set(sys.argv):
        options.parse()

    # The other ranks, options, data. What is wrong on one rank ends all of them, with one line.
    job = Job()
    with job.together():
        args = options.parse()
    args.dataset = job.of_rank_0(data.best_present(Path(args.data_dir)) if args.dataset == "auto" else args.dataset)
    args.output_dir = job.of_rank_0(args.output_dir or time.strftime(f"runs/%Y%m%d-%H%M%S-{args.model}"))
    for first in (True, False):  # one rank of each host may have to unpack or download files for the others
        with job.together():
            if first == (job.local_rank == 0):
                images = data.load(args)
    with job.together():
        device = choose(args.device)
    with job.together():
        log = Log(args, job)
        found = checkpoint.prepare(args) if job.rank == 0 else None

    # Model, optimizer, controller and quantizer.
    model = build_model(args.model, in_channels=images.channels, num_classes=images.classes, seed=args.seed).to(device)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    policy = options.make_policy(args)
    controller = None if policy is None else Controller(policy)
    forward, optimizer, quantizer = (with_ddp if job.ddp else with_horovod)(args, model, optimizer, controller)
    if job.of_rank_0(found):
        with job.together():
            log.lines = checkpoint.load(args, model, optimizer, quantizer)
        log.say(f"resumed after {len(log.lines)} of {args.epochs} epochs")

    batches = images.training_batches(args, job)
    hosts = len(set(job.gather(platform.node())))
    log.say(
        f"{args.dataset}: {images.sizes}; {args.model}, {sum(one.numel() for one in model.parameters())} parameters; "
        f"workers: {job.size}, hosts: {hosts}, {options.compression_of(args)}; {args.output_dir}"
    )
    with job.together():
        profile = profile_of_steps(Path(args.output_dir), device, len(batches)) if args.profile else None
    if profile is not None and job.rank == 0:
        profile.start()

    for epoch in range(len(log.lines), args.stop_after or args.epochs):
        began, level = time.perf_counter(), options.bits_of(args) if controller is None else controller.bits
        score, exchange, errors = Score(), 0.0, dict[str, float]()
        batches.sampler.set_epoch(epoch)  # type: ignore[attr-defined]  # a DistributedSampler
        torch.manual_seed((args.seed * 1000 + epoch) * 1000 + job.rank)  # of crops: an epoch can be repeated
        model.train()
        for step, (pixels, labels) in enumerate(log.bar(batches, epoch), start=epoch * len(batches)):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(args, step, len(batches), job.size)
            optimizer.zero_grad()
            with record_function("forward"):
                logits = forward(pixels.to(device))
                loss = F.cross_entropy(logits, labels.to(device))
            with record_function("backward"):
                loss.backward()
            waiting = time.perf_counter()
            if not job.ddp:  # which has exchanged gradients in backward
                with record_function("synchronize"):
                    optimizer.synchronize()
            exchange += time.perf_counter() - waiting
            if quantizer is not None and job.size > 1 and (step + 1) % len(batches) == 0:
                errors = relative_errors(quantizer, {name: value.grad for name, value in model.named_parameters()})
            with record_function("update"), nullcontext() if job.ddp else optimizer.skip_synchronize():
                optimizer.step()
            score.add(logits.detach().cpu(), labels, loss.item())
            if profile is not None and job.rank == 0:
                profile.step()
        in_steps = time.perf_counter() - began

        average_buffers(model, job)
        scores = score.over_ranks(job, "train")
        for name, part in (("val", images.validation), ("test", images.test)):
            scores |= evaluate(model, images.evaluation_batches(part, job), device).over_ranks(job, name)
        # The test set is for people: the controller never sees it.
        metrics = {name: scores[name] for name in ("train_loss", "val_loss", "val_accuracy")}
        if job.ddp and quantizer is not None:
            exchange = quantizer.meter.epoch(epoch).waited_seconds
        line: dict[str, Any] = {"epoch": epoch, "level": level, "next_level": level, "reason": "constant"}
        if controller is not None:
            line["next_level"] = controller.step(metrics, epoch=epoch, num_samples=int(score.samples))
            line["reason"] = controller.history[-1].reason
        line |= {**metrics, **scores, "hosts": hosts, "lr": optimizer.param_groups[0]["lr"]}
        line |= bytes_of_epoch(job, model, quantizer, level, epoch, len(batches))
        line |= {"tensor_errors": errors_over_ranks(job, errors, model)}
        line |= {"seconds_compute": in_steps - exchange, "seconds_exchange": exchange}
        log.lines.append(without_nan({**line, "seconds": time.perf_counter() - began}))
        state = checkpoint.state_of(args, model, optimizer, quantizer, log.lines)
        with job.together():
            if job.rank == 0:
                log.write()
                checkpoint.save(args, state)
    if profile is not None and job.rank == 0:
        profile.stop()
    with job.together():
        log.end()
    ranks.end()


def with_horovod(
    args: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer, controller: Controller | None
) -> tuple[Forward, Any, Any]:
    """Has Horovod exchange gradients: the model, the optimizer that does so, and the quantizer, if there is one."""
    import horovod.torch as hvd

    from hvd_dyncomp import DynamicQuantizer

    quantizer: Any = None
    if controller is not None:
        optimizer, quantizer = less_momentum(optimizer), DynamicQuantizer(controller)
    own = hvd.Compression.fp16 if args.compression == "fp16" else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=quantizer or own
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    if quantizer is not None:
        quantizer.attach(optimizer)
    return model, optimizer, quantizer


def with_ddp(
    args: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer, controller: Controller | None
) -> tuple[Forward, Any, Any]:
    """The same with DistributedDataParallel."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    # A convolution of grey images has gradients of other strides than its weight, in the same order in memory; and
    # what is to take the place of broadcast_buffers is not in every torch.
    for noise in ("Grad strides do not match bucket view strides", "`broadcast_buffers` is deprecated"):
        warnings.filterwarnings("ignore", noise)
    group = torch.distributed.new_group(backend="gloo") if nccl_refuses(next(model.parameters()).device) else None
    forward = DistributedDataParallel(model, process_group=group, bucket_cap_mb=8, broadcast_buffers=False)
    if controller is not None:
        quantizer = ddp.compress(forward, controller)
        return forward, less_momentum(optimizer), quantizer
    if args.compression == "fp16":
        forward.register_comm_hook(group, fp16_compress_hook)
    return forward, optimizer, None


def learning_rate(args: argparse.Namespace, step: int, steps_per_epoch: int, workers: int) -> float:
    """An epoch's linear warm-up to the rate of all workers together (Goyal et al., 2017), then a cosine."""
    peak, steps, warmup = args.lr * workers, steps_per_epoch * args.epochs, steps_per_epoch
    if step < warmup:
        return args.lr + (peak - args.lr) * step / warmup
    return peak * (1 + math.cos(math.pi * (step - warmup) / max(steps - warmup, 1))) / 2


@torch.no_grad()
def average_buffers(model: nn.Module, job: Job) -> None:
    """Give every rank the mean of all ranks' batch-norm statistics, which follow its own shard. Collective."""
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.copy_(job.mean(buffer))


@torch.no_grad()
def evaluate(model: nn.Module, batches: DataLoader, device: torch.device) -> Score:
    """The score of this rank's share of some images."""
    model.eval()
    score = Score()
    for pixels, labels in batches:
        logits = model(pixels.to(device)).cpu()
        score.add(logits, labels, F.cross_entropy(logits, labels).item())
    return score


if __name__ == "__main__":
    main()
