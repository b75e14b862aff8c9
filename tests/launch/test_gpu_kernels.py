"""The arithmetic's benchmark on GPUs, without one: what is timed, how often, what is said. And a run where there is."""

import json
from types import SimpleNamespace

import pytest
import torch

from bench import __main__ as program
from bench import gpu_kernels, kernels
from bench.gpu_kernels import Took
from hvd_dyncomp import LEVELS

MEBIBYTE = 2**20


def clock(actions, calls) -> Took:
    """Two seconds a call, and one of Python's; it calls everything once."""
    for action in actions:
        action()
    return Took(2.0, 1.0)


@pytest.fixture
def gpu(monkeypatch):
    """Torch sees a GPU, whose memory is the CPU's, with a cache of 1 MiB."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *number: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda n: SimpleNamespace(L2_cache_size=MEBIBYTE))
    monkeypatch.setattr(gpu_kernels, "compile_all", lambda device, block_size: 3.0)
    monkeypatch.setattr(gpu_kernels, "BUCKET", 2**18)
    measured = gpu_kernels.run
    monkeypatch.setattr(kernels.gpu_kernels, "run", lambda device, *rest: measured("cpu", *rest, clock))


def bench(*flags: str) -> bool:
    return program.run(program.parse(["kernels", *flags]))


def test_what_an_operation_moves_over_the_seconds_it_takes():
    found = gpu_kernels.timed("cpu", 1024, 512, seed=0)
    moved = {name: one.moved for name, one in found.items()}
    assert moved["copy"] == 8 * 1024 and moved["4 encode"] == 8 * 1024 + 8 * 66
    assert moved["4 decode"] == 4 * 1024 + 8 * 66
    assert moved["4 reduce 2"] == 4 * 1024 + 24 * 66
    theirs = gpu_kernels.references("cpu", 1024, 512, seed=0)
    assert {name: one.moved for name, one in theirs.items()} == {
        f"{bits} {name}*": moved[f"{bits} {name}"] for bits in LEVELS[:-1] for name in ("encode", "decode")
    }


def test_calls_go_through_sets_that_no_cache_holds():
    assert gpu_kernels.sets(2**21, 50 * MEBIBYTE) == 26  # of 8 MiB each, at least
    assert gpu_kernels.sets(2**27, 50 * MEBIBYTE) == 1
    called = []
    alike = [{"copy": gpu_kernels.Timed(lambda number=number: called.append(number), 1)} for number in range(3)]

    def through(actions, calls):
        for number in range(calls):
            actions[number % len(actions)]()
        return Took(1.0, 1.0)

    gpu_kernels.measure(alike, 2, through)
    assert called == [0, 1, 2, 0, 1, 0, 0]  # to warm up, to see what a call takes, and two rounds of one call each


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_on_a_gpu_that_is_there(tmp_path):
    assert bench("--device", "cuda", "--values", str(2**22), "--rounds", "1", "--output-dir", str(tmp_path))
    found = json.loads((tmp_path / "kernels-cuda.json").read_text())
    assert min(found["rates"].values()) > 0 and found["gpu"] in gpu_kernels.report(found)
