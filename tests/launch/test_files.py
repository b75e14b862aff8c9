"""Files that replace others in one go."""

import os
from pathlib import Path

import pytest

from common.files import replace_text


def test_the_usual_mode_is_that_of_any_new_file(tmp_path: Path) -> None:
    replace_text(tmp_path / "a", "text")
    (tmp_path / "b").write_text("text")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    replace_text(tmp_path / "a", "old")

    with pytest.raises(UnicodeEncodeError):
        replace_text(tmp_path / "a", "\udc80")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    os.symlink(tmp_path / "victim", tmp_path / "a")
    replace_text(tmp_path / "a", "text")
    assert (tmp_path / "victim").read_text() == "mine"
    assert not (tmp_path / "a").is_symlink()
