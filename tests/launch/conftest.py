"""Fixtures that several files of this folder use."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from runs import HOSTS, RELEASE, train


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run through a release that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(*RELEASE, "--output-dir", str(folder))
    return folder


@pytest.fixture(scope="module")
def whole_of_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The same on two hosts of two workers; and while it is in use, sums are repeatable."""
    folder = tmp_path_factory.mktemp("whole_of_hosts") / "run"
    with pytest.MonkeyPatch.context() as patch:
        # From three ranks on, Horovod's own sums depend on what happens to be fused.
        patch.setenv("HOROVOD_FUSION_THRESHOLD", "0")
        train(*RELEASE, "--output-dir", str(folder), hosts=HOSTS)
        yield folder
