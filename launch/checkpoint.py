"""One checkpoint per epoch, complete or not there at all, and the way back from it.

``OUTPUT_DIR/checkpoints/epoch-0007.pt`` is what all ranks share after seven epochs: weights, optimizer, controller.
``epoch-0007.rank1.pt`` is rank 1's own: its residuals and random state. The shared file is written last, once every
rank has written its own, so where it is there the checkpoint is complete. All ranks must see the folder.
"""

from __future__ import annotations

import os
import pickle
import re
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from agree import alone, together
from compression import Baseline, Quantized
from course import RunError, differences

FORMAT = 1
_SHARED = re.compile(r"epoch-(\d+)\.pt")


def newest(folder: Path) -> int | None:
    """Number of finished epochs in the newest complete checkpoint in ``folder``; None where there is none."""
    found = [_SHARED.fullmatch(path.name) for path in folder.glob("epoch-*.pt")]
    return max((int(match[1]) for match in found if match), default=None)


def save(
    folder: Path,
    finished: int,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    compression: Baseline | Quantized,
    config: dict[str, Any],
) -> None:
    """Write the checkpoint of ``finished`` epochs and remove older ones. Collective.

    Raises:
        SystemExit: with status 2 on every rank when a rank cannot write its file.
    """
    own = {"format": FORMAT, "quantizer": compression.rank_state(), "random": torch.get_rng_state()}
    shared = {
        "format": FORMAT,
        "config": config,
        "epoch": finished,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "controller": compression.shared_state(),
    }
    together("checkpoint.own", lambda: _write(own, _rank_file(folder, finished, hvd.rank())))
    first = hvd.rank() == 0
    alone("checkpoint.shared", lambda: _write(shared, _shared_file(folder, finished)), here=first)
    if first:
        _remove_older(folder, finished)


def load(
    folder: Path,
    finished: int,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    compression: Baseline | Quantized,
    config: dict[str, Any],
) -> None:
    """Bring model, optimizer, controller and residuals back to where they were after ``finished`` epochs. Collective.

    Raises:
        SystemExit: with status 2 on every rank when a file is damaged or belongs to another model, world size or
            configuration; nothing has been loaded then.
    """

    def read_both() -> tuple[dict, dict]:
        shared = read(_shared_file(folder, finished))
        compare(shared["config"], config, _shared_file(folder, finished))
        return shared, read(_rank_file(folder, finished, hvd.rank()))

    shared, own = together("checkpoint.read", read_both)
    model.load_state_dict(shared["model"])
    optimizer.load_state_dict(shared["optimizer"])
    compression.load(shared["controller"], own["quantizer"])
    torch.set_rng_state(own["random"])


def read(path: Path) -> dict[str, Any]:
    """Read one file of a checkpoint; nothing in it can run code.

    Raises:
        RunError: the file is missing, damaged or of another format.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise RunError(f"checkpoint {path} is missing") from None
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError, ValueError) as error:
        reason = " ".join(str(error).split())[:120]
        raise RunError(f"checkpoint {path} is damaged: {reason}") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise RunError(f"checkpoint {path} is not one of this program's, or of another version of it")
    return state


def compare(theirs: dict[str, Any], ours: dict[str, Any], path: Path) -> None:
    """Make sure that a checkpoint was made by the run that wants to go on from it.

    Raises:
        RunError: naming everything that differs, with both values.
    """
    differing = differences(theirs, ours)
    if differing:
        raise RunError(f"checkpoint {path} is of another run: {differing}")


def _shared_file(folder: Path, finished: int) -> Path:
    return folder / f"epoch-{finished:04d}.pt"


def _rank_file(folder: Path, finished: int, rank: int) -> Path:
    return folder / f"epoch-{finished:04d}.rank{rank}.pt"


def _write(state: dict[str, Any], path: Path) -> None:
    """Write by way of a temporary file: whoever finds ``path`` finds all of it."""
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _remove_older(folder: Path, finished: int) -> None:
    """Remove the checkpoints before ``finished``, shared files first, so that what is left is never half of one."""
    old = [path for path in folder.glob("epoch-*.pt") if int(path.name[6:].split(".")[0]) < finished]
    for path in sorted(old, key=lambda path: not _SHARED.fullmatch(path.name)):
        path.unlink(missing_ok=True)
