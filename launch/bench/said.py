"""What `python -m hvd_dyncomp probe` says on two hosts of one rank, for the page that shows it.

Writes DIR/said-probe.json.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.results import FOLDER, about, origin, save
from common.errors import RunError
from common.launcher import TORCHRUN
from common.launcher import run as started
from netlab.hosts import hosts

FILE = "said-probe.json"
_RATE = "1gbit"
_PROBE = ["-P", "-m", "hvd_dyncomp", "probe"]
_TIMEOUT = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What this part can be told, and its defaults."""
    parser.set_defaults(run=run)
    parser.add_argument("--output-dir", type=Path, default=FOLDER, metavar="DIR", help=f"default {FOLDER}")


def run(args: argparse.Namespace) -> None:
    """Start it, and keep its answer.

    Raises:
        RunError: the network cannot be made, or `probe` failed.
        subprocess.TimeoutExpired: it took longer than ten minutes.
    """
    environment = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    note = about(args.command, 0, environment, TORCHRUN)
    with hosts(2, _RATE) as lab:
        command = lab.command([sys.executable, *_PROBE], launcher=TORCHRUN)
        ended = started(command, timeout=_TIMEOUT, env={**os.environ, **environment})
    begins = ended.stdout.find("2 ranks on 2 hosts")
    if ended.returncode or begins < 0:
        raise RunError(f"probe ended with status {ended.returncode} and said: {ended.stdout}")
    save(args.output_dir / FILE, {"benchmark": "said", "about": note, "text": ended.stdout[begins:].strip()})


def report(results: Mapping[str, Any]) -> str:
    """As Markdown."""
    return f"```text\n{results['text']}\n```\n\n{origin([results['about']]).strip()}"
