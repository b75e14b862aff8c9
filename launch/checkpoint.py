"""One checkpoint per epoch, complete or not there at all, and the way back from it.

``OUTPUT_DIR/checkpoints/epoch-0007.pt`` is what all ranks share after seven epochs: weights, optimizer, controller.
``epoch-0007.rank1.pt`` is rank 1's own: its residuals and random state. The shared file is written last, once every
rank has written its own, so where it is there the checkpoint is complete. All ranks must see the folder. The one before
the newest is kept: should a disk have damaged the newest, the run goes on from there.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from agree import alone, together
from compression import Baseline, Quantized
from course import RunError, differences
from files import replace

from hvd_dyncomp.comm import gather_json

FORMAT = 1
_SHARED = re.compile(r"epoch-(\d+)\.pt")


def present(folder: Path) -> list[int]:
    """Numbers of finished epochs in the complete checkpoints in ``folder``, newest first."""
    found = [_SHARED.fullmatch(path.name) for path in folder.glob("epoch-*.pt")]
    return sorted((int(match[1]) for match in found if match), reverse=True)


def save(
    folder: Path,
    finished: int,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    compression: Baseline | Quantized,
    config: dict[str, Any],
) -> None:
    """Write the checkpoint of ``finished`` epochs and remove those older than the one before it. Collective.

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
        _remove_old(folder)


def load(
    folder: Path,
    candidates: list[int],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    compression: Baseline | Quantized,
    config: dict[str, Any],
    say: Callable[[str], None],
) -> int:
    """Bring model, optimizer, controller and residuals back to where they were. Collective.

    Args:
        candidates: numbers of finished epochs to try, in this order, the same on all ranks. Where a rank finds a file
            damaged or missing, all ranks go to the next.
        say: told about every candidate that was passed over.

    Returns:
        The number of finished epochs.

    Raises:
        SystemExit: with status 2 on every rank when no checkpoint can be read, or one belongs to another model, world
            size or configuration; nothing has been loaded then.
    """
    damage = ""
    for finished in candidates:
        shared, own, damage = together("checkpoint.read", partial(_read_both, folder, finished, config))
        damages = gather_json(damage, "checkpoint.damage")
        damage = next(filter(None, damages), "")
        if not damage:
            model.load_state_dict(shared["model"])
            optimizer.load_state_dict(shared["optimizer"])
            compression.load(shared["controller"], own["quantizer"])
            torch.set_rng_state(own["random"])
            return finished
        say(damage)

    def give_up() -> int:
        raise RunError(f"--resume: no checkpoint can be read; the last tried: {damage}")

    return together("checkpoint.none", give_up)


def _read_both(folder: Path, finished: int, config: dict[str, Any]) -> tuple[dict, dict, str]:
    """The shared state, this rank's own, and what is wrong with one of them."""
    path = _shared_file(folder, finished)
    try:
        shared, own = read(path), read(_rank_file(folder, finished, hvd.rank()))
    except RunError as error:
        return {}, {}, str(error)
    compare(shared["config"], config, path)
    return shared, own, ""


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
    replace(path, lambda file: torch.save(state, file), mode=0o600)


def _remove_old(folder: Path) -> None:
    """Remove all checkpoints but the newest two, shared files first, so that what is left is never half of one.

    And what a rank that was killed had begun to write: nobody is writing now.
    """
    for path in folder.glob("epoch-*.tmp"):
        path.unlink(missing_ok=True)
    oldest = min(present(folder)[:2])
    old = [path for path in folder.glob("epoch-*.pt") if int(path.name[6:].split(".")[0]) < oldest]
    for path in sorted(old, key=lambda path: not _SHARED.fullmatch(path.name)):
        path.unlink(missing_ok=True)
