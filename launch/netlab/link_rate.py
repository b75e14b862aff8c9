"""What a link really carries: the payload of one TCP connection between two hosts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import IO, cast

from netlab.hosts import Lab

_TRANSFER = [sys.executable, str(Path(__file__).with_name("transfer.py"))]


def measure(lab: Lab, nbytes: int) -> float:
    """Bits per second of payload from the first host to the second."""
    receiver = subprocess.Popen(lab.on_host(1, [*_TRANSFER, "receive"]), stdout=subprocess.PIPE, text=True)
    try:
        said = cast(IO[str], receiver.stdout)
        said.readline()
        subprocess.run(lab.on_host(0, [*_TRANSFER, "send", lab.addresses[1], str(nbytes)]), check=True)
        return float(said.readline())
    finally:
        receiver.kill()
        receiver.wait()
