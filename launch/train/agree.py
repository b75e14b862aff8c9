"""Ending a run on every rank because of something that perhaps only one rank knows.

A rank that leaves alone, because its disk is full or its data set is missing, makes all the others wait in their
next collective. So whatever can fail on one rank only is tried inside ``together``, which tells every rank the
outcome before anybody goes on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn, TypeVar

import torch

from common.errors import RunError
from common.lines import say
from hvd_dyncomp.transport import ranks
from hvd_dyncomp.transport.base import gather_json

T = TypeVar("T")
PROGRAM = "train_resnet.py"


def alone(what: str, action: Callable[[], T], *, here: bool) -> T | None:
    """``together`` for something that only some ranks do, those where ``here`` is true. Collective.

    Returns:
        The action's value; None on a rank that had nothing to do.
    """
    return together(what, lambda: action() if here else None)


def together(what: str, action: Callable[[], T]) -> T:
    """Run ``action`` on every rank, and go on only if it worked on all of them. Collective.

    Args:
        what: a fixed name for this place in the program, the same on every rank; names the collective.
        action: may raise RunError, OSError, ImportError or ValueError; other exceptions are bugs and pass through.

    Returns:
        This rank's value.

    Raises:
        SystemExit: with status 2, on every rank, after rank 0 has printed the first failing rank's line.
    """
    error = None
    try:
        value = action()
    except (RunError, OSError, ImportError, ValueError) as caught:
        error = _one_line(caught)
    errors = gather_json(ranks.transport(), error, f"together.{what}")
    failed = [(rank, text) for rank, text in enumerate(errors) if text is not None]
    if failed:
        _leave(failed)
    return value


def _leave(failed: list[tuple[int, str]]) -> NoReturn:
    """Print one line on rank 0 and end with status 2 everywhere. Collective; ``failed`` is the same on every rank."""
    transport = ranks.transport()
    if transport.rank == 0:
        rank, text = failed[0]
        where = "" if len(failed) == transport.size else f" (rank {rank})"
        say(f"{PROGRAM}: error: {text}{where}", sys.stderr)
    # mpirun ends the whole job with the first rank that exits, so nobody leaves before the line is out.
    transport.wait(transport.sum(torch.zeros(1), "leave.printed"))
    raise SystemExit(2)


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        # The second one is what a file was to be renamed to: the name that the user knows.
        return f"{error.filename2 or error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__
