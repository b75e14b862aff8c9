"""train_resnet.py with a disk that is full when a certain file is to be written.

    horovodrun -np 2 python tests/launch/full_disk.py STEM FLAGS...

STEM is the file's name without its suffix.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "launch"))

from common import files
from train import program

FULL = Path("/dev/full")  # takes nothing


def temporary_file(stem: str) -> Any:
    """Stands in for the function that `files.replace` makes its temporary files with."""

    def make(**arguments: Any) -> IO[bytes]:
        file = tempfile.NamedTemporaryFile(**arguments)  # noqa: SIM115  # whoever asked for it closes it
        if arguments["prefix"] == f"{stem}.":
            full = os.open(FULL, os.O_WRONLY)
            os.dup2(full, file.fileno())
            os.close(full)
        return file

    return make


def main() -> None:
    files.NamedTemporaryFile = temporary_file(sys.argv.pop(1))
    program.main()


if __name__ == "__main__":
    main()
