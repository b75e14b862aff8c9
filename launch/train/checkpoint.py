"""One checkpoint per epoch, complete or not there at all, and the way back from it.

``OUTPUT_DIR/checkpoints/epoch-0007.pt`` is what all ranks share after seven epochs: weights, optimizer, controller.
``epoch-0007.rank1.pt`` is rank 1's own: its residuals and random state. The shared file is written last, once every
rank has written its own, so where it is there the checkpoint is complete. All ranks must see the folder. The one before
the newest is kept: should a disk have damaged the newest, the run goes on from there.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from common.errors import RunError
from common.files import replace
from hvd_dyncomp.transport import ranks
from hvd_dyncomp.transport.base import gather_json
from train.agree import alone, together
from train.compression import Baseline, Quantized
from train.course import differences

FORMAT = 2
FOLDER = "checkpoints"  # in the output folder
_SHARED = re.compile(r"epoch-(\d{4,})\.pt")
_ANY = re.compile(r"epoch-(\d{4,})(\.rank\d+)?\.pt")
# What each kind of file holds beside its format, in the order of their use.
_SHARED_KEYS = ("config", "epoch", "model", "optimizer", "controller")
_OWN_KEYS = ("config", "epoch", "rank", "quantizer", "random")


def present(folder: Path) -> list[int]:
    """Numbers of finished epochs in the complete checkpoints in ``folder``, newest first."""
    found = [_SHARED.fullmatch(path.name) for path in folder.glob("epoch-*.pt") if path.is_file()]
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
    common = {"format": FORMAT, "config": config, "epoch": finished}
    own = {
        **common,
        "rank": ranks.transport().rank,
        "quantizer": compression.rank_state(),
        "random": torch.get_rng_state(),
    }
    shared = {
        **common,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "controller": compression.shared_state(),
    }
    together("checkpoint.own", lambda: _write(own, _rank_file(folder, finished, ranks.transport().rank)))

    def complete() -> None:
        _write(shared, _shared_file(folder, finished))
        _remove_old(folder, finished)

    alone("checkpoint.shared", complete, here=ranks.transport().rank == 0)


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
            size, configuration or rank.
    """
    damage = ""
    for finished in candidates:
        shared, own, damage = together("checkpoint.read", partial(_read_both, folder, finished, config))
        damages = gather_json(ranks.transport(), damage, "checkpoint.damage")
        damage = next(filter(None, damages), "")
        if not damage:
            path = _shared_file(folder, finished)
            together("checkpoint.load", partial(_put_back, path, shared, own, model, optimizer, compression))
            return finished
        say(damage)

    def give_up() -> int:
        raise RunError(f"--resume: no checkpoint can be read; the last tried: {damage}")

    return together("checkpoint.none", give_up)


def _read_both(folder: Path, finished: int, config: dict[str, Any]) -> tuple[dict, dict, str]:
    """The shared state, this rank's own, and what is wrong with one of them."""
    path, own_path = _shared_file(folder, finished), _rank_file(folder, finished, ranks.transport().rank)
    try:
        shared, own = read(path, _SHARED_KEYS), read(own_path, _OWN_KEYS)
    except RunError as error:
        return {}, {}, str(error)
    compare(shared["config"], config, path)
    compare(own["config"], config, own_path)
    # Files that were copied under another name.
    compare({"epoch": shared["epoch"]}, {"epoch": finished}, path)
    compare({key: own[key] for key in ("epoch", "rank")}, {"epoch": finished, "rank": ranks.transport().rank}, own_path)
    return shared, own, ""


def _put_back(
    path: Path,
    shared: dict[str, Any],
    own: dict[str, Any],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    compression: Baseline | Quantized,
) -> None:
    try:
        model.load_state_dict(shared["model"])
        optimizer.load_state_dict(shared["optimizer"])
        compression.load(shared["controller"], own["quantizer"])
        torch.set_rng_state(own["random"])
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise RunError(f"checkpoint {path} does not fit this run: {_reason(error)}") from error


def read(path: Path, keys: Iterable[str] = ()) -> dict[str, Any]:
    """Read one file of a checkpoint; nothing in it can run code.

    Args:
        keys: what it must hold.

    Raises:
        RunError: the file is missing, damaged or of another format.
    """
    try:
        # torch compares no checksums, and would load weights with changed bits as if nothing were.
        with zipfile.ZipFile(path) as archive:
            changed = archive.testzip()
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise RunError(f"checkpoint {path} is missing") from None
    except Exception as error:  # damage of every kind makes errors of every kind
        raise RunError(f"checkpoint {path} is damaged: {_reason(error)}") from error
    if changed is not None:
        raise RunError(f"checkpoint {path} is damaged: {changed} in it has changed")
    if not isinstance(state, dict) or state.get("format") != FORMAT or not all(key in state for key in keys):
        raise RunError(f"checkpoint {path} is not one of this program's, or of another version of it")
    return state


def _reason(error: BaseException) -> str:
    """What went wrong, in a line: the file's own error where torch has raised another in its place."""
    inner: BaseException | None = error
    while inner is not None and not isinstance(inner, OSError):
        inner = inner.__context__
    if isinstance(inner, OSError) and inner.strerror:
        return inner.strerror
    return " ".join(str(error).split())[:120] or type(error).__name__


def compare(theirs: Any, ours: dict[str, Any], path: Path) -> None:
    """Make sure that a checkpoint was made by the run that wants to go on from it.

    Raises:
        RunError: naming everything that differs, with both values.
    """
    differing = differences(theirs, ours) if isinstance(theirs, dict) else "it has no configuration"
    if differing:
        raise RunError(f"checkpoint {path} is of another run: {differing}")


def _shared_file(folder: Path, finished: int) -> Path:
    return folder / f"epoch-{finished:04d}.pt"


def _rank_file(folder: Path, finished: int, rank: int) -> Path:
    return folder / f"epoch-{finished:04d}.rank{rank}.pt"


def _write(state: dict[str, Any], path: Path) -> None:
    """Whole or not at all.

    Raises:
        RunError: it cannot be written, for instance because the disk is full; nothing is left of it then.
    """
    try:
        replace(path, lambda file: torch.save(state, file), mode=0o600)
    except (OSError, RuntimeError) as error:  # torch turns some of a file's errors into its own
        raise RunError(f"checkpoint {path} cannot be written: {_reason(error)}") from error


def _remove_old(folder: Path, finished: int) -> None:
    """Keep checkpoint ``finished`` and the one before it; remove older ones, and what a killed rank had begun to write.

    Shared files go first, so that what is left is never half of one. What is numbered higher does not count: it is no
    checkpoint that this run could read.
    """
    for path in folder.glob("epoch-*.tmp"):  # nobody is writing now
        path.unlink(missing_ok=True)
    oldest = min([number for number in present(folder) if number <= finished][:2])
    # Nothing but this program's own: people put other things into the folder, too.
    found = [(path, _ANY.fullmatch(path.name)) for path in folder.glob("epoch-*.pt") if path.is_file()]
    old = [path for path, match in found if match and int(match[1]) < oldest]
    for path in sorted(old, key=lambda path: not _SHARED.fullmatch(path.name)):
        path.unlink(missing_ok=True)
