"""Runs several commands at the same time until all have ended, or one has failed. Started by hosts.py, not by hand.

Each argument is a command as JSON. If one fails, the others are ended with all their descendants; the status is that of
the first that failed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # whose folders know each other by name

from common.launcher import end
from netlab.hosts import come_down_on_signals

_POLL_SECONDS = 0.05


def together(commands: list[list[str]]) -> int:
    """Run commands; the status of the first that failed, or 0."""
    running: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            running.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))
        while running:
            time.sleep(_POLL_SECONDS)
            statuses = [one.poll() for one in running]
            running = [one for one, status in zip(running, statuses, strict=True) if status is None]
            if failed := next(filter(None, statuses), 0):
                return failed
        return 0
    finally:
        for one in running:
            end(one.pid)
            one.wait()


if __name__ == "__main__":
    come_down_on_signals()
    raise SystemExit(together([json.loads(command) for command in sys.argv[1:]]))
