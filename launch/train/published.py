"""Files that others have published: read, and downloaded where they are missing, as what their checksums say."""

from __future__ import annotations

import gzip
import hashlib
import io
import sys
import urllib.request
import zlib
from dataclasses import dataclass
from pathlib import Path

from common.errors import RunError
from common.files import replace
from common.lines import say

_PATIENCE = 30.0  # seconds without a byte
_LARGEST = 200_000_000  # bytes; more than any data set here has


@dataclass(frozen=True)
class Published:
    """A file that is known by its checksum.

    Attributes:
        name: of the file.
        sha256: of the file; where ``packed``, of what is in it.
        packed: it is a gzip file, read as what is in it. Packers differ in the header only: Debian drops the name.
        url: of the folder that it can be had from; "" where it comes with a package.
    """

    name: str
    sha256: str
    packed: bool = False
    url: str = ""

    def read(self, folder: Path) -> bytes:
        """The contents of the file in ``folder``.

        Raises:
            RunError: it is damaged, or another file of that name.
            OSError: it cannot be read.
        """
        return self._checked((folder / self.name).read_bytes(), str(folder / self.name))

    def get(self, folder: Path) -> bytes:
        """The contents of the file in ``folder``, into which it is downloaded if it is missing.

        Raises:
            RunError, OSError: as ``read``; also where it cannot be downloaded.
        """
        if not (folder / self.name).exists():
            raw = self._download()
            self._checked(raw, self.url + self.name)
            folder.mkdir(parents=True, exist_ok=True)
            replace(folder / self.name, lambda file: file.write(raw))
        return self.read(folder)

    def _download(self) -> bytes:
        say(f"downloading {self.url}{self.name}", sys.stderr)
        with urllib.request.urlopen(self.url + self.name, timeout=_PATIENCE) as answer:  # noqa: S310 - a constant
            return answer.read(_LARGEST)

    def _checked(self, raw: bytes, where: str) -> bytes:
        contents = _unpacked(raw, where) if self.packed else raw
        found = hashlib.sha256(contents).hexdigest()
        if found != self.sha256:
            what = "SHA-256 of the contents" if self.packed else "SHA-256"
            raise RunError(f"{where} is damaged or another file: {what} {found}, expected {self.sha256}")
        return contents


def _unpacked(raw: bytes, where: str) -> bytes:
    try:
        with gzip.open(io.BytesIO(raw)) as file:
            return file.read(_LARGEST)  # a few bytes can be packed that fill the memory
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise RunError(f"{where} is damaged: {error}") from error
