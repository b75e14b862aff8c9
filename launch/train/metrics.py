"""What a run says and leaves behind: a line an epoch, metrics.jsonl, summary.json, TensorBoard's scalars."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from common.errors import RunError
from common.files import replace_text
from common.lines import say
from hvd_dyncomp.meter import allreduce_bytes
from train import options
from train.job import Job

METRICS, SUMMARY = "metrics.jsonl", "summary.json"  # in the output folder
_SUMMED = ("bytes_sent", "bytes_float32", "seconds", "seconds_compute", "seconds_exchange")
_LAST = ("train_accuracy", "val_accuracy", "test_accuracy", "train_loss", "test_loss", "hosts")


@dataclass
class Score:
    """Sums over samples; `loss` is their cross entropy in nats."""

    loss: float = 0.0
    correct: float = 0.0
    samples: float = 0.0

    def add(self, logits: Tensor, labels: Tensor, mean_loss: float) -> None:
        self.loss += mean_loss * len(labels)
        self.correct += (logits.argmax(dim=1) == labels).sum().item()
        self.samples += len(labels)

    def over_ranks(self, job: Job, name: str) -> dict[str, float]:
        """Loss and accuracy over the samples of all ranks. Collective."""
        sums = torch.tensor([self.loss, self.correct, self.samples], dtype=torch.float64)
        loss, correct, samples = job.mean(sums).tolist()
        return {f"{name}_loss": loss / samples, f"{name}_accuracy": correct / samples}


def bytes_of_epoch(job: Job, model: nn.Module, quantizer: Any, bits: float, epoch: int, steps: int) -> dict[str, float]:
    """What a worker has sent, and what it would have sent as float32: means over the workers. Collective."""
    if quantizer is None:
        float32 = steps * allreduce_bytes(sum(4 * value.numel() for value in model.parameters()), job.size)
        sent = float32 * bits / 32
    else:
        traffic = quantizer.meter.epoch(epoch)
        sent, float32 = traffic.sent_bytes, traffic.float32_bytes
    sent, float32 = job.mean(torch.tensor([sent, float32], dtype=torch.float64)).tolist()
    return {
        "bytes_sent": sent,
        "bytes_float32": float32,
        "saved_fraction": 1 - sent / float32 if float32 else 0.0,
    }


def errors_over_ranks(job: Job, own: Mapping[str, float], model: nn.Module) -> dict[str, float]:
    """Relative errors by tensor: means of squares over the ranks that can tell. Collective."""
    everybody = job.gather(dict(own))
    known = {name: [one[name] for one in everybody if name in one] for name, _ in model.named_parameters()}
    return {name: math.hypot(*some) / math.sqrt(len(some)) for name, some in known.items() if some}


def without_nan(line: dict[str, Any]) -> dict[str, Any]:
    """None for what JSON does not know."""
    return {key: None if isinstance(one, float) and not math.isfinite(one) else one for key, one in line.items()}


class Log:
    """What rank 0 says and writes.

    Attributes:
        lines: of all epochs, those before a resumption included.

    Raises:
        RunError: --tensorboard is given, and TensorBoard is missing.
    """

    def __init__(self, args: argparse.Namespace, job: Job) -> None:
        self._folder, self._epochs = Path(args.output_dir), args.epochs
        self._config, self._writes = {**options.config(args), "world_size": job.size}, job.rank == 0
        self.lines: list[dict[str, Any]] = []
        self._writer: Any = None
        if args.tensorboard and self._writes:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise RunError(f"--tensorboard: needs TensorBoard: pip install tensorboard ({error})") from error
            self._writer = SummaryWriter

    def say(self, text: str) -> None:
        if self._writes:
            say(text)

    def bar(self, batches: Any, epoch: int) -> Any:
        """Batches with a bar, where stderr is a terminal: under horovodrun and mpirun it is a pipe."""
        title = f"epoch {epoch + 1}/{self._epochs}"
        return tqdm(batches, title, leave=False, disable=None if self._writes else True)

    def write(self) -> None:
        """Say what the last epoch has come to, and write it down."""
        line = self.lines[-1]
        say(_sentence(line, self._epochs))
        replace_text(self._folder / METRICS, "".join(json.dumps(line) + "\n" for line in self.lines))
        if self._writer is not None:
            if isinstance(self._writer, type):  # what an interrupted run wrote beyond its checkpoint is forgotten
                self._writer = self._writer(str(self._folder / "tensorboard"), purge_step=line["epoch"] + 1)
            for name, value in scalars(line).items():
                self._writer.add_scalar(name, value, line["epoch"] + 1)
            self._writer.flush()

    def end(self) -> None:
        """Of a run that has all its epochs: write the summary."""
        if not self._writes or len(self.lines) < self._epochs:
            return
        summary = summary_of(self._config, self.lines)
        replace_text(self._folder / SUMMARY, json.dumps(summary, indent=2) + "\n")
        say(
            f"test accuracy {summary['test_accuracy']:.2%}, sent {summary['bytes_sent'] / 1e6:.1f} MB per worker, of "
            f"float32's {summary['bytes_float32'] / 1e6:.1f}, {summary['seconds'] / 60:.1f} minutes; {self._folder}"
        )


def summary_of(config: dict[str, Any], lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The last epoch's accuracies, and all epochs' sums; "released": of those at 32 bits of a run that compresses."""
    released = [line for line in lines if line["level"] == 32 and config["compression"] != "none"]
    return {
        "config": config,
        "epochs": len(lines),
        **{key: lines[-1][key] for key in _LAST},
        "levels": [line["level"] for line in lines],
        **_sums(lines),
        "released": {"epochs": len(released), **_sums(released)},
    }


def read_lines(folder: Path) -> list[dict[str, Any]]:
    """The epochs of a run."""
    return [json.loads(line) for line in (folder / METRICS).read_text(encoding="utf-8").splitlines()]


def scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line by the names that TensorBoard groups at the slash."""
    tensor_errors = {f"tensor_errors/{name}": value for name, value in line["tensor_errors"].items()}
    numbers = {name: value for name, value in line.items() if isinstance(value, float | int)}
    return {f"{name.partition('_')[0]}/{name}": value for name, value in numbers.items()} | tensor_errors


def _sums(lines: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    return {key: sum(line[key] for line in lines) for key in _SUMMED}


def _sentence(line: Mapping[str, Any], epochs: int) -> str:
    following = f" -> {line['next_level']} bits ({line['reason']})" if line["next_level"] != line["level"] else ""
    loss = "nan" if line["train_loss"] is None else f"{line['train_loss']:.3f}"
    saved = round(100 * line["saved_fraction"])
    return (
        f"epoch {line['epoch'] + 1:>2}/{epochs}  {line['level']:>2} bits  loss {loss}  "
        f"accuracy train {line['train_accuracy']:.1%} val {line['val_accuracy']:.1%} test {line['test_accuracy']:.1%}  "
        f"sent {line['bytes_sent'] / 1e6:.1f} MB per worker "
        f"({f'{saved}% saved' if saved >= 0 else f'{-saved}% more than float32'})  {line['seconds']:.1f} s "
        f"(compute {line['seconds_compute']:.1f}, exchange {line['seconds_exchange']:.1f}){following}"
    )
