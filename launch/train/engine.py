"""One epoch of training, evaluation over all ranks, and what keeps the replicas the same."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import record_function

from common.device import moved
from hvd_dyncomp.transport import ranks
from hvd_dyncomp.transport.base import gather_json
from train.batches import TrainBatches
from train.compression import Baseline, Quantized
from train.frameworks import WithDdp, WithHorovod
from train.gradients import GradientNorm


@dataclass
class Score:
    """Sums over samples; ``loss`` is their cross entropy in nats."""

    loss: float = 0.0
    correct: float = 0.0
    samples: float = 0.0

    def add(self, logits: Tensor, labels: Tensor, mean_loss: float) -> None:
        self.loss += mean_loss * len(labels)
        self.correct += (logits.argmax(dim=1) == labels).sum().item()
        self.samples += len(labels)

    @property
    def mean_loss(self) -> float:
        return self.loss / max(self.samples, 1)

    @property
    def accuracy(self) -> float:
        return self.correct / max(self.samples, 1)

    def over_ranks(self, name: str) -> Score:
        """The same over the samples of all ranks; ``name`` is the collective's. Collective.

        Sums travel as float64, in which counts are exact whatever the ranks' shares are.
        """
        sums = torch.tensor([self.loss, self.correct, self.samples], dtype=torch.float64)
        transport = ranks.transport()
        return Score(*transport.wait(transport.sum(sums, f"score.{name}")).tolist())


class LearningRate:
    """Learning rate of a step: linear warm-up to base * workers (Goyal et al., 2017), then cosine or steps of a tenth.

    It depends on the step's number alone, so that a resumed run needs to know nothing but where it is.

    Args:
        base: rate of one worker.
        workers: world size.
        steps_per_epoch, epochs: length of the plan.
        warmup_epochs: over which the rate rises from ``base``; may be fractional or 0.
        shape: "cosine" (to zero at the end), or "step" (a tenth after 50 % of the epochs, a hundredth after 75 %).
    """

    def __init__(
        self, base: float, workers: int, steps_per_epoch: int, epochs: int, warmup_epochs: float, shape: str
    ) -> None:
        self.base, self.peak, self.shape = base, base * workers, shape
        self.steps = steps_per_epoch * epochs
        self.warmup = round(steps_per_epoch * warmup_epochs)

    def at(self, step: int) -> float:
        if step < self.warmup:
            return self.base + (self.peak - self.base) * step / self.warmup
        if self.shape == "cosine":
            done = (step - self.warmup) / max(self.steps - self.warmup, 1)
            return self.peak * (1 + math.cos(math.pi * done)) / 2
        done = step / self.steps
        return self.peak * (1.0 if done < 0.5 else 0.1 if done < 0.75 else 0.01)


@dataclass
class Seconds:
    """Where the time of the training steps went on this rank.

    ``exchange`` is the time in which nothing but the exchange could go on: inside ``optimizer.synchronize()``, waiting
    for slower ranks included, and inside the quantizer during the backward pass. What Horovod sends meanwhile in its
    own thread is hidden behind ``compute``, which is the rest: batches, forward, backward, update. On a GPU the program
    is ahead: what it has queued counts where it waits for it, which is ``exchange`` for most of backward.
    """

    compute: float = 0.0
    exchange: float = 0.0


def train_epoch(
    model: nn.Module,
    framework: WithHorovod | WithDdp,
    compression: Baseline | Quantized,
    rate: LearningRate,
    batches: TrainBatches,
    epoch: int,
    on_step: Callable[[Score], None],
    gradient_norm: GradientNorm | None = None,
    clip_norm: float | None = None,
) -> tuple[Score, Seconds, dict[str, float]]:
    """Train for one epoch on this rank's shard; ``on_step`` is called after every step. Collective.

    ``gradient_norm`` gets the reduced gradients of every step, if anybody wants to know. Then they are clipped to a
    norm of ``clip_norm``, all together, unless it is None.

    Returns:
        This rank's score over its training batches, as they were when each was met; its seconds; and the relative
        errors of the last step's means, by parameter's name.
    """
    model.train()
    optimizer = framework.optimizer
    score, seconds = Score(), Seconds()
    errors: dict[str, float] = {}
    step = epoch * len(batches)
    begin = time.perf_counter()
    for images, labels in moved(batches.epoch(epoch), next(model.parameters()).device):
        for group in optimizer.param_groups:
            group["lr"] = rate.at(step)
        inside = compression.sent().seconds
        optimizer.zero_grad()
        with record_function("forward"):
            logits = framework.forward(images)
            loss = F.cross_entropy(logits, labels)
        with record_function("backward"):
            loss.backward()
        inside = compression.sent().seconds - inside
        waiting = time.perf_counter()
        with record_function("synchronize"):
            framework.synchronize()
        exchange = time.perf_counter() - waiting + inside
        if gradient_norm is not None:
            gradient_norm.add()
        if (step + 1) % len(batches) == 0:
            # Now: clipped gradients are no means any more.
            errors = compression.relative_errors({name: p.grad for name, p in model.named_parameters()})
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        with record_function("update"), framework.synchronized():
            optimizer.step()
        compression.stepped()
        step += 1
        score.add(logits.detach(), labels, loss.item())
        end = time.perf_counter()
        seconds.exchange += exchange
        seconds.compute += end - begin - exchange
        on_step(score)
        begin = time.perf_counter()
    return score, seconds, errors


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], name: str) -> Score:
    """Score of the model over all ranks' batches; ``name`` is the collective's. Collective."""
    model.eval()
    score = Score()
    for images, labels in moved(batches, next(model.parameters()).device):
        logits = model(images)
        score.add(logits, labels, F.cross_entropy(logits, labels).item())
    return score.over_ranks(name)


def average_buffers(model: nn.Module) -> None:
    """Give every rank the mean of all ranks' batch-norm statistics. Collective, in one allreduce.

    Each rank's running mean and variance follow its own shard. Without this every rank would evaluate another model,
    and a checkpoint of rank 0 would be that of one shard. The mean of variances leaves out the variance between the
    ranks' means, which is small where shards are drawn from one shuffled set.
    """
    buffers = [buffer for _, buffer in model.named_buffers() if buffer.is_floating_point()]
    transport = ranks.transport()
    if not buffers or transport.size == 1:
        return
    # On the CPU: they are small, and NCCL refuses ranks that share a GPU.
    flat = torch.cat([buffer.flatten() for buffer in buffers]).cpu()
    flat = transport.wait(transport.sum(flat, "batchnorm.buffers")) / transport.size
    for buffer, mean in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
        buffer.copy_(mean.view_as(buffer))


def check_replicas(model: nn.Module) -> None:
    """Make sure that all ranks hold the same parameters and buffers, bit for bit. Collective.

    Raises:
        RuntimeError: they do not; on every rank.
    """
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    digests = gather_json(ranks.transport(), digest.hexdigest(), "replica.digest")
    if len(set(digests)) > 1:
        raise RuntimeError(
            f"the ranks' models have drifted apart: {len(set(digests))} versions on {len(digests)} ranks"
        )
