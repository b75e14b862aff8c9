"""Fixtures that several files of this folder use."""

from pathlib import Path

import pytest

from runs import RELEASE, train


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run through a release that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(*RELEASE, "--output-dir", str(folder))
    return folder
