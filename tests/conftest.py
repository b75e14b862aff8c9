"""The folders of launch/ import each other by name, since a command lies beside them; so do tests that use them."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hvd_dyncomp
from hvd_dyncomp import kernels

ROOT = Path(__file__).resolve().parents[1]

sys.path.insert(0, str(ROOT / "launch"))


@pytest.fixture(autouse=True, scope="module")
def kernels_stay() -> Iterator[None]:
    """Other kernels, left behind by a test, would go unnoticed and make those after it slow."""
    before = dict(kernels.backends)
    yield
    # The first tensor on a GPU brings those of GPUs.
    assert kernels.backends in (before, before | {"cuda": kernels.backends.get("cuda")})


def pytest_configure() -> None:
    # "python -m pytest" would test the source tree, which has no native kernels.
    if Path(hvd_dyncomp.__file__).resolve().is_relative_to(ROOT / "hvd_dyncomp"):
        raise pytest.UsageError(
            "these are tests of the installed package: run 'make test', or 'pytest' after 'make setup'"
        )
