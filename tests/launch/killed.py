"""train_resnet.py with a rank that is killed, as the kernel kills when memory is short: no handler, no goodbye.

    horovodrun -np 2 python tests/launch/killed.py RANK POINT CALL [HOSTS] -- FLAGS...

The process of rank RANK kills itself at the CALL-th time that it comes to POINT, one of `POINTS`. HOSTS is as in
placed.py.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "launch"))

import horovod.torch as hvd
import torch

import train_resnet
from hvd_dyncomp import Controller, DynamicQuantizer
from placed import place
from train import checkpoint


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Killer:
    """Makes functions deadly."""

    def __init__(self, rank: int, call: int) -> None:
        self._rank, self._left = rank, call

    def due(self) -> bool:
        if hvd.rank() != self._rank:
            return False
        self._left -= 1
        return self._left == 0

    def before(self, owner: Any, name: str) -> None:
        self._replace(owner, name, lambda function, arguments: die())

    def after(self, owner: Any, name: str) -> None:
        def run_and_die(function: Callable, arguments: tuple) -> None:
            function(*arguments[0], **arguments[1])
            die()

        self._replace(owner, name, run_and_die)

    def half_written(self) -> None:
        def write_half(function: Callable, arguments: tuple) -> None:
            (args, state), whole = arguments[0], io.BytesIO()
            torch.save(state, whole)
            Path(args.output_dir, "checkpoint.tmp").write_bytes(whole.getvalue()[: whole.tell() // 2])
            die()

        self._replace(checkpoint, "save", write_half)

    def _replace(self, owner: Any, name: str, deadly: Callable) -> None:
        function = getattr(owner, name)

        def replacement(*args: Any, **kwargs: Any) -> Any:
            if self.due():
                deadly(function, (args, kwargs))
            return function(*args, **kwargs)

        setattr(owner, name, replacement)


POINTS: dict[str, Callable[[Killer], None]] = {
    "before the exchange": lambda killer: killer.before(DynamicQuantizer, "compress"),
    "after the exchange": lambda killer: killer.after(DynamicQuantizer, "decompress"),
    "in Controller.step": lambda killer: killer.before(Controller, "step"),
    "while it writes a checkpoint": lambda killer: killer.half_written(),
}


def main() -> None:
    separator = sys.argv.index("--")
    rank, point, call, *hosts = sys.argv[1:separator]
    if hosts:
        place(hosts[0])
    POINTS[point](Killer(int(rank), int(call)))
    sys.argv[1:] = sys.argv[separator + 1 :]
    train_resnet.main()


if __name__ == "__main__":
    main()
