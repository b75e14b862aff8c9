"""Data sets: found, checked, read, downloaded."""

import gzip
import hashlib
import io
import socket
import struct
import tarfile
import time
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from common.errors import RunError
from runs import main
from train import data, datasets
from train.published import Published


def idx(array: np.ndarray) -> bytes:
    header = struct.pack(">BBBB", 0, 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.tobytes()


def fashion_mnist_arrays() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (count, 28, 28), dtype=np.uint8) for count in (48, 10)]
    labels = [(np.arange(count) % 10).astype(np.uint8) for count in (48, 10)]
    return [images[0], labels[0], images[1], labels[1]]


def publish(monkeypatch: pytest.MonkeyPatch, contents: list[bytes]) -> list[bytes]:
    """Has the program believe that these are Fashion-MNIST's files; returns them as they lie on disk."""
    files = [
        replace(file, sha256=hashlib.sha256(raw).hexdigest())
        for file, raw in zip(datasets.FASHION_MNIST, contents, strict=True)
    ]
    monkeypatch.setattr(datasets, "FASHION_MNIST", tuple(files))
    return [gzip.compress(raw) for raw in contents]


def lay(folder: Path, raws: list[bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for file, raw in zip(datasets.FASHION_MNIST, raws, strict=True):
        (folder / file.name).write_bytes(raw)


@pytest.mark.parametrize("below", ["", "FashionMNIST/raw"])
def test_fashion_mnist_is_found_in_the_data_dir(below: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = fashion_mnist_arrays()
    lay(tmp_path / below, publish(monkeypatch, [idx(array) for array in arrays]))
    assert datasets.best_present(tmp_path) == "fashion-mnist"
    (images, labels), (test_images, test_labels) = datasets.read("fashion-mnist", tmp_path)
    for tensor, array in zip((images[:, 0], labels, test_images[:, 0], test_labels), arrays, strict=True):
        assert torch.equal(tensor, torch.from_numpy(array).to(tensor.dtype))
    found = data.load("fashion-mnist", tmp_path)
    assert (len(found.train), len(found.val), len(found.test)) == (44, 4, 10)
    assert found.in_channels == 1 and found.flip


@pytest.mark.skipif(not any(map(Path.is_dir, datasets.DEBIAN_FASHION_MNIST)), reason="no Debian package")
def test_debians_files_are_the_published_ones() -> None:
    (images, labels), (test_images, test_labels) = datasets.read("fashion-mnist", Path("nowhere"))
    assert images.shape == (60000, 1, 28, 28) and test_images.shape == (10000, 1, 28, 28)
    assert labels.bincount().tolist() == [6000] * 10 and test_labels.bincount().tolist() == [1000] * 10


def cifar10_archive() -> tuple[bytes, np.ndarray]:
    """Six batches of four records, and all the records."""
    records = np.random.default_rng(0).integers(0, 256, (24, 3073), dtype=np.uint8)
    records[:, 0] = np.arange(24) % 10
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        names = [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]
        for name, batch in zip(names, np.split(records, 6), strict=True):
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}.bin")
            member.size = batch.size
            tar.addfile(member, io.BytesIO(batch.tobytes()))
    return file.getvalue(), records


def test_cifar10_is_read_from_its_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw, records = cifar10_archive()
    (tmp_path / datasets.CIFAR10.name).write_bytes(raw)
    monkeypatch.setattr(datasets, "CIFAR10", replace(datasets.CIFAR10, sha256=hashlib.sha256(raw).hexdigest()))
    assert datasets.best_present(tmp_path) == "cifar10"
    (images, labels), (test_images, test_labels) = datasets.read("cifar10", tmp_path)
    assert labels.tolist() == records[:20, 0].tolist() and test_labels.tolist() == records[20:, 0].tolist()
    # A row of the third image's green plane.
    assert images[2, 1, 5].tolist() == records[2, 1 + 1024 + 5 * 32 :][:32].tolist()
    assert test_images.shape == (4, 3, 32, 32) and images.dtype == torch.uint8


def test_another_cifar10_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / datasets.CIFAR10.name).write_bytes(cifar10_archive()[0])
    with pytest.raises(RunError, match=f"{datasets.CIFAR10.name} is damaged.*expected {datasets.CIFAR10.sha256}"):
        datasets.read("cifar10", tmp_path)


def damaged(raw: bytes, how: str) -> bytes:
    other = bytearray(gzip.decompress(raw))
    other[-1] ^= 1
    return {"empty": b"", "cut": raw[:-9], "no gzip": b"x" + raw[1:], "one bit": gzip.compress(bytes(other))}[how]


@pytest.mark.parametrize("how", ["empty", "cut", "no gzip", "one bit"])
@pytest.mark.parametrize("which", range(4))
def test_damaged_files_are_refused_by_name(
    which: int, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raws = publish(monkeypatch, [idx(array) for array in fashion_mnist_arrays()])
    raws[which] = damaged(raws[which], how)
    lay(tmp_path, raws)
    with pytest.raises(RunError) as caught:
        datasets.read("fashion-mnist", tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / datasets.FASHION_MNIST[which].name} is damaged")


def test_a_small_file_that_would_fill_the_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.published._LARGEST", 1000)
    (tmp_path / "a.gz").write_bytes(gzip.compress(bytes(10**6)))
    with pytest.raises(RunError, match="a.gz is damaged or another file"):
        Published("a.gz", hashlib.sha256(bytes(10**6)).hexdigest(), packed=True).read(tmp_path)


class Server:
    """Stands in for the network: what each address answers."""

    def __init__(self, answers: dict[str, bytes]) -> None:
        self.answers = answers

    def __call__(self, url: str, timeout: float) -> io.BytesIO:
        if url not in self.answers:
            raise urllib.error.URLError("no route to host")
        return io.BytesIO(self.answers[url])


def test_what_is_missing_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raws = publish(monkeypatch, [idx(array) for array in fashion_mnist_arrays()])
    monkeypatch.setattr(datasets, "DEBIAN_FASHION_MNIST", ())
    answers = {file.url + file.name: raw for file, raw in zip(datasets.FASHION_MNIST, raws, strict=True)}
    monkeypatch.setattr(urllib.request, "urlopen", Server(answers))
    assert len(datasets.read("fashion-mnist", tmp_path)[0][1]) == 48
    # The second time it is there.
    monkeypatch.setattr(urllib.request, "urlopen", Server({}))
    assert len(datasets.read("fashion-mnist", tmp_path)[0][1]) == 48
    assert sorted(path.name for path in tmp_path.rglob("*.*")) == sorted(file.name for file in datasets.FASHION_MNIST)


@pytest.mark.parametrize("served", [None, b"<html>"])
def test_nothing_else_is_downloaded(served: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = datasets.CIFAR10.url + datasets.CIFAR10.name
    monkeypatch.setattr(urllib.request, "urlopen", Server({} if served is None else {url: served}))
    expected = "nor to be downloaded.*no route to host" if served is None else f"{url} is damaged or another file"
    with pytest.raises(RunError, match=expected):
        datasets.read("cifar10", tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("there", ["nothing", "a file"])
def test_a_network_that_says_nothing_is_not_waited_for(
    there: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every download goes to somebody who takes the call and never answers."""
    folder = tmp_path / "data"
    if there == "a file":
        folder.touch()
    monkeypatch.setattr("train.published._PATIENCE", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        silent = f"http://127.0.0.1:{server.getsockname()[1]}/"
        monkeypatch.setattr(datasets, "CIFAR10", replace(datasets.CIFAR10, url=silent))
        flags = ("--dataset", "cifar10", "--data-dir", str(folder), "--output-dir", str(tmp_path / "run"))
        begin = time.monotonic()
        status, said = main(*flags)
    assert status == 2 and said[0] == f"downloading {silent}{datasets.CIFAR10.name}"
    assert f"{datasets.CIFAR10.name} is not in {folder}, nor to be downloaded" in said[1] and len(said) == 2
    assert time.monotonic() - begin < 30
