"""Fixtures that several files of this folder use."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from runs import HOSTS, RELEASE, train, train_as_documented


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run through a release that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    train_as_documented(*RELEASE, "--output-dir", str(folder))
    return folder


@pytest.fixture(scope="session")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, stopped in the middle of the release, with a profile; and what it said, in a file "said"."""
    folder = tmp_path_factory.mktemp("interrupted") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONUNBUFFERED", "1")  # when lines are torn, if they ever are
        said = train_as_documented(*RELEASE, "--output-dir", str(folder), "--stop-after", "4", "--profile")
    (folder / "said").write_text(said)
    return folder


@contextmanager
def repeatable_sums() -> Iterator[None]:
    # From three ranks on, Horovod's own sums depend on what happens to be fused.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOROVOD_FUSION_THRESHOLD", "0")
        yield


@pytest.fixture(scope="session")
def run_of_hosts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same on two hosts of two workers, with repeatable sums."""
    folder = tmp_path_factory.mktemp("whole_of_hosts") / "run"
    with repeatable_sums():
        train(*RELEASE, "--output-dir", str(folder), hosts=HOSTS)
    return folder


@pytest.fixture(scope="module")
def whole_of_hosts(run_of_hosts: Path) -> Iterator[Path]:
    """That run; and while it is in use, sums are repeatable in other runs as well."""
    with repeatable_sums():
        yield run_of_hosts
