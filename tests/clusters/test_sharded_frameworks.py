"""The program of docs/examples for Lightning and a model in shards runs as it is, and resumes bit for bit."""

import re
import sys
from pathlib import Path

import pytest

from recipes import EXAMPLES, need, said_by

pytestmark = [pytest.mark.clusters, pytest.mark.timeout(500)]

PROGRAM = (EXAMPLES / "fsdp_lightning.py").read_text(encoding="utf-8")
RANKS = 4


def trained(folder: Path, epochs: int) -> tuple[int, str]:
    """The share of bytes that were saved, in percent, and a checksum of the parameters."""
    assert PROGRAM.count("max_epochs=4") == 1
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(PROGRAM.replace("max_epochs=4", f"max_epochs={epochs}"), encoding="utf-8")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    said = said_by([sys.executable, *launcher, "train.py"], 150, cwd=folder)
    [(saved, digest)] = re.findall(r"(\d+)% of the bytes saved; parameters (\w{16})", said)
    return int(saved), digest


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    need("lightning")
    saved, whole = trained(tmp_path / "whole", epochs=4)
    assert 80 < saved < 88
    _, half = trained(tmp_path / "again", epochs=2)
    assert half != whole
    assert trained(tmp_path / "again", epochs=4) == (saved, whole)
