"""The part "memory" of the benchmarks: measured on ranks, and what is told to whom where nothing is started."""

import json
import sys
from pathlib import Path

import pytest

from common.launcher import run
from netlab.hosts import why_not

pytestmark = pytest.mark.thorough

BENCH = str(Path(__file__).parents[2] / "launch" / "bench")
VALUES = 2**22 + 1000
needs_namespaces = pytest.mark.skipif(bool(why_not()), reason=why_not() or "namespaces can be made")


def measured(folder: Path, *flags: str) -> dict:
    place = ("--values", str(VALUES), "--output-dir", str(folder))
    ended = run([sys.executable, BENCH, "memory", *place, *flags], timeout=240)
    assert ended.returncode == 0, ended.stdout
    assert "| bytes a value |" in ended.stdout
    [path] = folder.iterdir()
    return json.loads(path.read_text())


def test_on_ranks_of_one_host(tmp_path):
    results = measured(tmp_path, "--layouts", "2", "--launcher", "gloo", "--methods", "none,4bit")
    assert (tmp_path / "memory-gloo.json").exists() and results["about"]["launcher"] == "gloo"
    [layout] = results["layouts"].values()
    assert list(layout["contenders"]) == ["none", "4bit"]
    for ranks in layout["contenders"].values():
        assert len(ranks) == 2 and all(rank.keys() == {"host"} for rank in ranks)
    # A residual is 2 bytes a value, and codes half of one each time that they are there; all are in one bucket. A copy
    # of all codes would be 1 more, a gradient or a parameter too many 4.
    assert all(2.9 < rank["host"] / VALUES < 3.9 for rank in layout["contenders"]["4bit"])


@pytest.mark.soak  # the exchange's memory is the same
def test_on_torchruns_ranks(tmp_path):
    results = measured(tmp_path, "--layouts", "2", "--launcher", "torchrun", "--methods", "ddp,4bit-ddp")
    assert (tmp_path / "memory-torchrun.json").exists()
    plain, ours = results["layouts"]["2"]["contenders"].values()
    # DDP makes its bucket, here of all values, anew after the first step.
    assert all(3.9 < rank["host"] / VALUES < 4.6 for rank in plain)
    # A residual is 2 bytes a value; a gradient too many would be 4.
    assert all(1.8 < (a["host"] - b["host"]) / VALUES < 3.2 for a, b in zip(ours, plain, strict=True))


@pytest.mark.soak  # the other layouts find what takes too much
@needs_namespaces
def test_on_hosts_of_several_workers(tmp_path):
    layouts = measured(tmp_path, "--layouts", "2x2", "--methods", "4bit")["layouts"]
    assert (layouts["2x2"]["hosts"], layouts["2x2"]["workers_per_host"]) == (2, 2)
    assert [rank["host"] > 4 * VALUES for rank in layouts["2x2"]["contenders"]["4bit"]] == [True] * 4
