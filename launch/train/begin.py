"""How a rank of train_resnet.py begins: flags, the other ranks, threads."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys

import torch

from common.errors import RunError
from common.lines import say
from hvd_dyncomp.transport import mpi_settings, ranks
from train import options, tensorboard
from train.agree import PROGRAM, together


def begin() -> argparse.Namespace:
    """Read the command line and find the other ranks. Collective.

    Raises:
        SystemExit: with status 2 on every rank for a bad command line; what is wrong is said once, not by every rank.
            Likewise, but said by every rank, if fewer are connected than a launcher has started.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parsed: argparse.Namespace | None = options.parse()
    except SystemExit as ended:
        if not ended.code:  # --help
            raise
        parsed = None
    for name, value in mpi_settings.DEFAULTS.items():
        os.environ.setdefault(name, value)
    try:
        ranks.start()
    except ranks.RanksMissing as error:  # there is nobody with whom to agree
        say(f"{PROGRAM}: error: {error}", sys.stderr)
        raise SystemExit(2) from None

    def check() -> argparse.Namespace:
        if parsed is None:
            raise RunError(said.getvalue().partition(" error: ")[2])
        if parsed.tensorboard and ranks.transport().rank == 0:  # which is the one that writes
            tensorboard.writer_class()
        return parsed

    args = together("flags", check)
    _set_threads()
    return args


def _set_threads() -> None:
    """Share this machine's cores among its workers.

    torch takes all cores by default; two workers with two threads each on two cores then spend more time waiting for
    each other than computing. Fewer, by OMP_NUM_THREADS or a launcher that binds workers to cores, stay fewer.
    """
    share = max(1, (os.cpu_count() or 1) // ranks.transport().local_size)
    torch.set_num_threads(min(torch.get_num_threads(), share))
