"""Lines that reach their reader whole."""

from __future__ import annotations

import sys
from typing import TextIO


def say(text: str, file: TextIO | None = None) -> None:
    """Writes a line, and its end with it, in one piece.

    `print` writes the end by itself where Python does not buffer (``PYTHONUNBUFFERED``, as many containers have it).
    What reads the pipe of a rank, mpirun for one, puts its tag before each piece it gets, and then there is one in the
    middle of the line.

    Args:
        text: without the end of the line.
        file: stdout, by default.
    """
    file = sys.stdout if file is None else file
    file.write(f"{text}\n")
    file.flush()
