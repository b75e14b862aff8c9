"""The tools of `make docs` and `make dist`, which are kept apart from what is tested."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / ".venv-maintain" / "bin"


@pytest.fixture(scope="session")
def tools() -> Path:
    """The folder of their programs."""
    if not (TOOLS / "mkdocs").exists():
        pytest.skip(f"there is no {TOOLS.relative_to(ROOT)}: run 'make docs' once")
    return TOOLS
