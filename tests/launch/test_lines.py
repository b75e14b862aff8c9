"""What a run prints comes in whole lines, however it is read."""

import os
import sys
from pathlib import Path

import pytest

from common.launcher import run
from runs import PROGRAM, TIMEOUT


@pytest.mark.thorough
def test_what_is_wrong_is_one_piece(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    reader, writer = os.pipe2(os.O_DIRECT)  # keeps pieces apart
    try:
        flags = ["--dataset", "digits", "--output-dir", str(tmp_path / "file" / "run")]
        env = os.environ | {"PYTHONUNBUFFERED": "1"}
        assert run([sys.executable, PROGRAM, *flags], timeout=TIMEOUT, output=writer, env=env).returncode == 2
    finally:
        os.close(writer)
        pieces = [piece.decode() for piece in iter(lambda: os.read(reader, 65536), b"")]
        os.close(reader)
    assert pieces[-1].startswith("train_resnet.py: error: ") and pieces[-1].endswith(": Not a directory\n"), pieces
