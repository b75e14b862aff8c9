"""Files that replace others in one go."""

import os
import stat
from pathlib import Path

import pytest

from common.files import replace, replace_text


def test_a_file_is_private_until_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    seen = []

    def write(file) -> None:
        file.write(b"new")
        others = [other for other in tmp_path.iterdir() if other != path]
        seen.extend((stat.S_IMODE(other.stat().st_mode), path.read_text()) for other in others)

    replace(path, write, mode=0o640)
    assert seen == [(0o600, "old")]
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert list(tmp_path.iterdir()) == [path]


def test_the_usual_mode_is_that_of_any_new_file(tmp_path: Path) -> None:
    replace_text(tmp_path / "a", "text")
    (tmp_path / "b").write_text("text")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    replace_text(tmp_path / "a", "old")

    def fail(file) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        replace(tmp_path / "a", fail)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    os.symlink(tmp_path / "victim", tmp_path / "a")
    replace_text(tmp_path / "a", "text")
    assert (tmp_path / "victim").read_text() == "mine"
    assert not (tmp_path / "a").is_symlink()
