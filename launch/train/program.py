"""Trains a ResNet on several workers while a controller moves the bit-width of the gradients.

Examples:
    horovodrun -np 2 python launch/train_resnet.py
    mpirun -np 2 python launch/train_resnet.py --levels 1,2,4
    torchrun --nproc-per-node 2 launch/train_resnet.py
    python launch/train_resnet.py --help
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from common.device import choose
from common.errors import RunError
from hvd_dyncomp import less_momentum
from hvd_dyncomp.exchange.topology import Topology
from hvd_dyncomp.transport import ranks
from hvd_dyncomp.transport.base import gather_json
from train import begin, checkpoint, data, datasets
from train.agree import alone, together
from train.batches import TrainBatches, eval_batches
from train.carried import Carried, megabytes, placement
from train.compression import Baseline, Quantized, make_compression, watches_gradients
from train.course import course
from train.engine import LearningRate, Score, Seconds, average_buffers, check_replicas, evaluate, train_epoch
from train.frameworks import WithDdp, WithHorovod, distribute
from train.gradients import GradientNorm
from train.metrics import METRICS, SUMMARY, Metrics, Progress, write_summary
from train.models import build_model
from train.profiling import Profile
from train.tensorboard import Board
from train.traffic import errors_over_ranks, find_hosts, over_ranks


@dataclass
class Run:
    """Everything one rank trains with."""

    args: argparse.Namespace
    output_dir: Path
    data: data.Data
    topology: Topology
    model: torch.nn.Module
    compression: Baseline | Quantized
    framework: WithHorovod | WithDdp
    batches: TrainBatches
    rate: LearningRate
    config: dict[str, Any]
    progress: Progress
    metrics: Metrics
    board: Board | None  # on rank 0, with --tensorboard
    gradient_norm: GradientNorm | None  # where the policy watches it

    @property
    def checkpoints(self) -> Path:
        return self.output_dir / checkpoint.FOLDER


def main() -> None:
    args = begin.begin()
    # Nothing here draws from the global generator; a model with dropout would, and differently on each rank.
    torch.manual_seed(args.seed + ranks.transport().rank)
    run = set_up(args)
    finished = resume(run) if args.resume else 0
    writes = args.tensorboard and ranks.transport().rank == 0
    run.board = alone("tensorboard", lambda: Board(run.output_dir, run.metrics.lines), here=writes)
    run.framework.broadcast()
    profile = together("profile", lambda: make_profile(run, finished))
    for epoch in range(finished, args.stop_after or args.epochs):
        train_one_epoch(run, epoch, profile if epoch == finished else None)
    complete = ranks.transport().rank == 0 and len(run.metrics.lines) == args.epochs
    if run.board is not None:
        run.board.close()
    if profile is not None:
        run.progress.say(profile.where)
    summary = alone("summary", lambda: write_summary(run.output_dir, run.config, run.metrics.lines), here=complete)
    if summary:
        carried = Carried.of(summary)
        sent = carried.in_words(f", of float32's {megabytes(carried.float32)}")
        run.progress.say(
            f"test accuracy {summary['test_accuracy']:.2%}, {sent}, {summary['seconds'] / 60:.1f} minutes; "
            f"{run.output_dir}"
        )
    ranks.end()


def set_up(args: argparse.Namespace) -> Run:
    """Data, model and optimizer, the same on every rank. Collective.

    Raises:
        SystemExit: with status 2 on every rank when something is missing on one of them.
    """
    images = load_data(args)
    output_dir = prepare_output(args)

    def build() -> torch.nn.Module:
        channels, classes = images.in_channels, images.num_classes
        return build_model(
            args.model, in_channels=channels, num_classes=classes, shortcut=args.shortcut, seed=args.seed
        )

    model = together("model", build).to(together("device", lambda: choose(args.device)))
    topology = find_hosts()
    compression = together("compression", lambda: make_compression(args, model, topology))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum, weight_decay=args.weight_decay)
    if isinstance(compression, Quantized):
        optimizer = less_momentum(optimizer)
    framework = distribute(model, optimizer, compression)
    here = ranks.transport()
    batches = TrainBatches(
        images, args.batch_size, rank=here.rank, size=here.size, seed=args.seed, augmented=args.augment
    )
    rate = LearningRate(args.lr, here.size, len(batches), args.epochs, args.warmup_epochs, args.lr_schedule)
    progress = Progress(args.progress, args.epochs, rank=here.rank)
    where = placement(topology.size, len(topology.hosts))
    progress.say(
        f"{images.name}: {len(images.train)} training, {len(images.val)} validation, {len(images.test)} test images; "
        f"{args.model}, {sum(p.numel() for p in model.parameters())} parameters; {where}, "
        f"compression {args.compression}; {output_dir}"
    )
    return Run(
        args=args,
        output_dir=output_dir,
        data=images,
        topology=topology,
        model=model,
        compression=compression,
        framework=framework,
        batches=batches,
        rate=rate,
        config=course(args, images.name, here.size, ddp=ranks.under_torchrun()),
        progress=progress,
        metrics=Metrics(output_dir),
        board=None,
        gradient_norm=GradientNorm(model.parameters()) if watches_gradients(args) else None,
    )


def load_data(args: argparse.Namespace) -> data.Data:
    """The data set, chosen by rank 0 and downloaded, where it must be, by one rank of each machine. Collective."""
    folder = Path(args.data_dir)
    name = args.dataset
    if name == "auto":
        chosen = alone("dataset", lambda: datasets.best_present(folder), here=ranks.transport().rank == 0)
        name = gather_json(ranks.transport(), chosen, "dataset.name")[0]

    def load() -> data.Data:
        return data.load(name, folder, val_size=args.val_size, limit_train=args.limit_train, seed=args.seed)

    early = alone("data.first", load, here=ranks.local_rank() == 0)
    return together("data.others", lambda: early or load())


def prepare_output(args: argparse.Namespace) -> Path:
    """The output folder, made and found writable by rank 0. Collective."""
    new = time.strftime(f"runs/%Y%m%d-%H%M%S-{args.model}-{args.compression}")
    folder = Path(gather_json(ranks.transport(), args.output_dir or new, "output.dir")[0])

    def prepare() -> None:
        used = [name for name in (METRICS, SUMMARY) if (folder / name).exists()]
        if used and not args.resume:
            raise RunError(f"--output-dir {folder}: holds a run already ({used[0]}); add --resume or name another one")
        if args.resume and not (folder / checkpoint.FOLDER).exists():
            raise RunError(f"--resume: --output-dir {folder}: there is no run")
        (folder / checkpoint.FOLDER).mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()

    alone("output", prepare, here=ranks.transport().rank == 0)
    return folder


def resume(run: Run) -> int:
    """Load the newest checkpoint that is whole; returns the number of finished epochs. Collective."""
    first = ranks.transport().rank == 0
    found = alone("resume.find", lambda: checkpoint.present(run.checkpoints), here=first)
    candidates = gather_json(ranks.transport(), found, "resume.candidates")[0]
    if not candidates:
        alone("resume.metrics", run.metrics.forget, here=first)
        run.progress.say("the run was interrupted before its first checkpoint: from the beginning")
        return 0
    finished = checkpoint.load(
        run.checkpoints, candidates, run.model, run.framework.optimizer, run.compression, run.config, run.progress.say
    )
    alone("resume.metrics", lambda: run.metrics.keep(finished), here=first)
    run.progress.say(f"resumed after {finished} of {run.args.epochs} epochs, at {run.compression.bits} bits")
    return finished


def make_profile(run: Run, finished: int) -> Profile | None:
    """What --profile asks for: of the first epoch that is trained now, on rank 0.

    Raises:
        RunError: there is nothing that it could show; on every rank.
    """
    if not run.args.profile:
        return None
    if finished >= (run.args.stop_after or run.args.epochs):
        raise RunError(f"--profile: no epoch is left to train, {finished} are finished")
    profile = Profile(run.output_dir, next(run.model.parameters()).device, len(run.batches))
    return profile if ranks.transport().rank == 0 else None


def train_one_epoch(run: Run, epoch: int, profile: Profile | None) -> None:
    """Train, evaluate, let the controller decide, and write it all down. Collective."""
    begin = time.perf_counter()
    level, before = run.compression.bits, run.compression.sent()
    run.progress.begin(epoch, len(run.batches))

    def on_step(score: Score) -> None:
        run.progress.step(score, level, run.compression.sent().since(before).saved_fraction)
        if profile is not None:
            profile.step()

    if profile is not None:
        profile.begin()
    own, seconds, errors = train_epoch(
        *(run.model, run.framework, run.compression, run.rate, run.batches, epoch, on_step),
        gradient_norm=run.gradient_norm,
        clip_norm=run.args.clip_norm,
    )
    sent = over_ranks(run.compression.sent().since(before), len(run.topology.hosts))
    tensor_errors = errors_over_ranks(errors, run.model)
    average_buffers(run.model)
    check_replicas(run.model)
    shard = {"rank": ranks.transport().rank, "size": ranks.transport().size}
    train = own.over_ranks("train")
    val = evaluate(run.model, eval_batches(run.data.val, run.data, **shard), "val")
    test = evaluate(run.model, eval_batches(run.data.test, run.data, **shard), "test")
    # The test set is for people: the controller never sees it.
    watched = {} if run.gradient_norm is None else {"gradient_norm": run.gradient_norm.take()}
    decision = run.compression.next_level(
        {"train_loss": train.mean_loss, "val_accuracy": val.accuracy, "val_loss": val.mean_loss, **watched},
        epoch=epoch,
        num_samples=int(own.samples),
    )
    line = {
        "epoch": epoch,
        "level": level,
        "next_level": decision[0],
        "reason": decision[1],
        "steps_by_level": run.compression.steps_by_level(epoch),
        "tensor_errors": tensor_errors,
        **watched,
        **_scores(train, val, test),
        **sent,
        **_times(seconds, time.perf_counter() - begin),
        "lr": run.framework.optimizer.param_groups[0]["lr"],
    }
    run.progress.end(line)
    alone("metrics", lambda: write_down(run, line), here=ranks.transport().rank == 0)
    checkpoint.save(run.checkpoints, epoch + 1, run.model, run.framework.optimizer, run.compression, run.config)
    if run.args.profile:
        together("profile.file", lambda: profile.write() if profile is not None else None)


def write_down(run: Run, line: dict[str, Any]) -> None:
    """An epoch, wherever somebody looks for it."""
    run.metrics.add(line)
    if run.board is not None:
        run.board.add(line)


def _scores(train: Score, val: Score, test: Score) -> dict[str, float]:
    scores = {"train": train, "val": val, "test": test}
    losses = {f"{name}_loss": score.mean_loss for name, score in scores.items()}
    return losses | {f"{name}_accuracy": score.accuracy for name, score in scores.items()}


def _times(seconds: Seconds, total: float) -> dict[str, float]:
    return {"seconds": total, "seconds_compute": seconds.compute, "seconds_exchange": seconds.exchange}
