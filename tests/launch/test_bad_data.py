"""Data that are missing, cut short or mixed up end train_resnet.py with one line and status 2, soon."""

import shutil
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import data
import numpy as np
import pytest
from runs import assert_refused
from test_data import write_idx


def fashion_mnist(folder: Path) -> Path:
    for (images, labels), count in zip(data._IDX_FILES.values(), (48, 10), strict=True):
        write_idx(folder / images, np.zeros((count, 28, 28), np.uint8))
        write_idx(folder / labels, (np.arange(count) % 10).astype(np.uint8))
    return folder


def half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def overwritten(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:12] + b"\xff" * 8 + content[20:])


def another_file(name: str) -> Callable[[Path], None]:
    return lambda path: shutil.copy(path.with_name(name), path)


TRAIN_IMAGES, TRAIN_LABELS = data._IDX_FILES["train"]
TEST_IMAGES, TEST_LABELS = data._IDX_FILES["test"]


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        (TRAIN_IMAGES, half, "damaged gzip file"),
        (TRAIN_IMAGES, overwritten, "damaged gzip file"),
        (TEST_LABELS, half, "damaged gzip file"),
        (TRAIN_LABELS, another_file(TEST_LABELS), "48, 1, 28, 28) and 10 labels"),
        (TRAIN_IMAGES, another_file(TRAIN_LABELS), "training images of shape"),
        (TEST_LABELS, lambda path: write_idx(path, np.full(10, 200, np.uint8)), "differ in size or classes"),
        (TEST_LABELS, lambda path: write_idx(path, np.zeros(0, np.uint8)), "0 labels"),
    ],
)
def test_damaged_data(name: str, damage: Callable[[Path], None], said: str, tmp_path: Path) -> None:
    damage(fashion_mnist(tmp_path) / name)
    flags = ("--dataset", "fashion-mnist", "--data-dir", str(tmp_path), "--output-dir", str(tmp_path / "run"))
    assert_refused(flags, said)


@pytest.fixture
def silent_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every download goes to somebody who takes the call and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        for name in ("http_proxy", "https_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("no_proxy", "")
        monkeypatch.setattr(urllib.request, "_opener", None)  # it has read the environment once already, perhaps
        monkeypatch.setattr(data, "_DOWNLOAD_TIMEOUT", 0.3)
        yield


@pytest.mark.parametrize("there", ["nothing", "a batch cut short", "a file"])
def test_data_that_are_not_there_and_a_network_that_says_nothing(
    there: str, silent_network: None, tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    if there == "a file":
        folder.touch()
    elif there == "a batch cut short":
        (folder / "cifar-10-batches-py").mkdir(parents=True)
        (folder / "cifar-10-batches-py" / "data_batch_1").write_bytes(b"\x80\x02}q\x01(U\x0bbatch")
    begin = time.monotonic()
    flags = ("--dataset", "cifar10", "--data-dir", str(folder), "--output-dir", str(tmp_path / "run"))
    assert_refused(flags, "CIFAR10 is missing or damaged", str(folder))
    assert time.monotonic() - begin < 30
