"""Files that are whole or not there at all, and nobody else's while they are being written."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import NamedTemporaryFile

# Read once, here: asking means setting it, for all threads.
_UMASK = os.umask(0o077)
os.umask(_UMASK)
_USUAL = 0o666 & ~_UMASK


def replace_text(path: Path, text: str) -> None:
    """Write a file by way of a temporary one beside it: whoever finds ``path`` finds all of it."""
    # tempfile makes a new file, so that nothing is written through a link that somebody else has put there.
    with NamedTemporaryFile(dir=path.parent, prefix=f"{path.stem}.", suffix=".tmp", delete=False) as file:
        try:
            file.write(text.encode())
            file.flush()
            os.fchmod(file.fileno(), _USUAL)
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
