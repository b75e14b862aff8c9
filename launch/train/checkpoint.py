"""One file that holds all of a run: replaced after each epoch, and the way back from it."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch

from common.errors import RunError
from hvd_dyncomp import AllRanks
from train.metrics import METRICS
from train.options import config, differences

CHECKPOINT = "checkpoint.pt"  # in the output folder


def prepare(args: argparse.Namespace) -> bool:
    """Make the output folder; whether there is a checkpoint to go on from. For rank 0.

    Raises:
        RunError: the folder holds another run.
        OSError: it cannot be made.
    """
    folder = Path(args.output_dir)
    if not args.resume and (folder / METRICS).exists():
        raise RunError(f"--output-dir {folder}: holds a run already; add --resume or name another one")
    folder.mkdir(parents=True, exist_ok=True)
    return args.resume and (folder / CHECKPOINT).exists()


def load(
    args: argparse.Namespace, model: torch.nn.Module, optimizer: torch.optim.Optimizer, quantizer: Any
) -> list[dict[str, Any]]:
    """Bring everything back to where it was; returns the lines of the finished epochs. Every rank reads the file.

    Raises:
        RunError: it is damaged, or of a run with other options.
        OSError: this rank cannot read it.
    """
    path = Path(args.output_dir, CHECKPOINT)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # damage of every kind makes errors of every kind
        raise RunError(f"{path} is damaged: {error}") from error
    if differing := differences(state["config"], config(args)):
        raise RunError(f"--resume: {path} is of another run: {differing}")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    if quantizer is not None:
        AllRanks(quantizer).load_state_dict(state["quantizer"])
    return state["lines"]


def state_of(
    args: argparse.Namespace,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    quantizer: Any,
    lines: list[dict[str, Any]],
) -> dict[str, Any]:
    """All that `load` puts back. Collective: a quantizer has residuals of its own on every rank."""
    return {
        "config": config(args),
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "quantizer": None if quantizer is None else AllRanks(quantizer).state_dict(),
        "lines": lines,
    }


def save(args: argparse.Namespace, state: dict[str, Any]) -> None:
    """Replace the checkpoint: whoever finds it finds all of it. For rank 0."""
    path = Path(args.output_dir, CHECKPOINT)
    torch.save(state, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)
