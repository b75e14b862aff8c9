"""The documentation as a site: it builds without a warning, asks nobody for anything, and browsers do not complain."""

import functools
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)

pytestmark = pytest.mark.release


@pytest.fixture(scope="module")
def site(tools: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [tools / "mkdocs", "build", "--strict", "-f", ROOT / "docs" / "site" / "mkdocs.yml", "--site-dir", folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return folder


def pages(site: Path) -> list[Path]:
    return sorted(site.rglob("*.html"))


def test_every_page_is_there(site: Path) -> None:
    docs = ROOT / "docs"
    folders = (docs, docs / "tables", docs / "dev", docs / "api")
    expected = {path.stem for folder in folders for path in folder.glob("*.md")}
    expected |= {"index", "404"}
    assert {page.stem for page in pages(site)} == expected


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    for page in pages(site):
        text = page.read_text(encoding="utf-8")
        fetched = re.findall(r"<(?:script|img|link|iframe)\b[^>]*?\b(?:src|href)=\"?(https?:|//)", text)
        assert not fetched, page.name


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    class Silent(SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Silent, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join(timeout=10)


@pytest.mark.skipif(BROWSER is None, reason="there is no browser")
@pytest.mark.parametrize("page", ["index", "api/ddp", "quickstart", "study"])
def test_a_browser_has_no_complaint(page: str, address: str, tmp_path: Path) -> None:
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--enable-logging=stderr"]
    flags += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=5000", "--dump-dom"]
    command = [BROWSER, *flags, f"{address}/{page}.html"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "<h1" in done.stdout and ":CONSOLE" not in done.stderr  # where a page's complaints come
