"""The page about training runs as a browser sees it; skipped where there is none."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from made_up_runs import LEVELS, line, write

from hvd_dyncomp.report.page import page
from hvd_dyncomp.report.runs import read_runs

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)

pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"there is none of {', '.join(BROWSERS)}")


def browse(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Loads page.html; what the page says on its console comes on stderr."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--enable-logging=stderr"]
    flags += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1400,1000", "--hide-scrollbars"]
    address = (tmp_path / "page.html").as_uri()
    return subprocess.run([BROWSER, *flags, *arguments, address], capture_output=True, text=True, timeout=120)


def complaints(said: str) -> list[str]:
    return [one for one in said.splitlines() if ":CONSOLE" in one]


@pytest.fixture
def text(tmp_path: Path) -> str:
    values = {"conv1.weight": 2, "fc.bias": 8}
    first = write(tmp_path / "one", [line(epoch, tensor_errors=values) for epoch in range(len(LEVELS))], {"epochs": 6})
    second = write(tmp_path / "two & a half", [line(epoch, reason="<script>") for epoch in range(3)], after="{")
    return page(read_runs([first, second]))


def test_it_renders_and_nothing_is_complained_of(text: str, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(text, encoding="utf-8")
    done = browse(tmp_path, "--dump-dom")
    assert done.returncode == 0, done.stderr
    assert not complaints(done.stderr)
    # What the browser has made of it is what was written: nothing was moved, closed or dropped.
    for tag in ("svg", "polyline", "rect", "circle", "table", "tr", "li", "script"):
        assert len(re.findall(f"<{tag}[ >]", done.stdout)) == len(re.findall(f"<{tag}[ >]", text)), tag
    picture = tmp_path / "page.png"
    assert browse(tmp_path, f"--screenshot={picture}").returncode == 0
    assert picture.stat().st_size > 20_000


def test_complaints_would_be_seen(text: str, tmp_path: Path) -> None:
    """The same, with a script, which the page's own policy forbids."""
    broken = text.replace("</body>", "<script>console.error('seen')</script></body>")
    (tmp_path / "page.html").write_text(broken, encoding="utf-8")
    assert complaints(browse(tmp_path, "--dump-dom").stderr)
