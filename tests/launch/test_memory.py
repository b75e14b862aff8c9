"""The part "memory" of the benchmarks: measured on ranks, and what is told to whom where nothing is started."""

import json
import re
import sys
from pathlib import Path

import pytest

from bench import __main__ as program
from bench import memory, report, start
from common.errors import RunError
from common.launcher import run
from netlab.hosts import why_not

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


def bench(*flags: str) -> bool:
    return program.run(program.parse(["memory", *flags]))


def test_on_ranks_of_one_host(tmp_path):
    results = measured(tmp_path, "--layouts", "2", "--launcher", "gloo", "--methods", "none,4bit")
    assert (tmp_path / "memory-gloo.json").exists() and results["about"]["launcher"] == "gloo"
    [layout] = results["layouts"].values()
    assert list(layout["contenders"]) == ["none", "4bit"]
    for ranks in layout["contenders"].values():
        assert len(ranks) == 2 and all(rank.keys() == {"host"} for rank in ranks)
    # A residual is 4 bytes a value, and codes half of one each time that they are there; all are in one bucket. A
    # gradient or a parameter too many would be 4 more.
    assert all(4 < rank["host"] / VALUES < 8 for rank in layout["contenders"]["4bit"])


@needs_namespaces
def test_on_hosts_of_several_workers(tmp_path):
    layouts = measured(tmp_path, "--layouts", "2x2", "--methods", "4bit")["layouts"]
    assert (layouts["2x2"]["hosts"], layouts["2x2"]["workers_per_host"]) == (2, 2)
    assert [rank["host"] > 4 * VALUES for rank in layouts["2x2"]["contenders"]["4bit"]] == [True] * 4


@pytest.fixture
def started(monkeypatch):
    """Command lines and environments of what would have been started; each worker has measured something."""
    seen = []

    def measure(command, environment):
        spec = json.loads(command[-1])
        seen.append((command, spec, environment))
        kinds = ("host", "gpu") if spec["device"] == "cuda" else ("host",)
        found = [{kind: (2 + rank) * spec["values"] for kind in kinds} for rank in range(2)]
        Path(spec["file"]).write_text(json.dumps(found))

    monkeypatch.setattr(memory, "start", measure)
    return seen


def test_figures_of_launchers_and_devices_have_files_and_sections_of_their_own(tmp_path, monkeypatch, capsys, started):
    folder = tmp_path / "data"
    monkeypatch.setattr(memory, "choose_for", lambda wish, workers: wish)
    monkeypatch.setattr(memory.gpus, "found", lambda n: {"gpus": ["a GPU"], "horovod": "host memory", "ddp": "gloo"})
    place = ("--layouts", "2", "--methods", "fp16", "--values", "1000", "--output-dir", str(folder))
    for choice in ((), ("--launcher", "gloo"), ("--launcher", "gloo", "--device", "cuda")):
        assert bench(*place, *choice)
    names = ["memory-gloo-cuda.json", "memory-gloo.json", "memory.json"]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert [spec["device"] for _, spec, _ in started] == ["cpu", "cpu", "cuda"]
    assert [command[0].endswith("horovodrun") for command, _, _ in started] == [False, True, True]
    assert all(env["MALLOC_MMAP_THRESHOLD_"] == "65536" for _, _, env in started)  # or glibc's heap is measured as well
    assert [env.get("NCCL_SOCKET_IFNAME") for _, _, env in started] == [None, None, "eth0"]
    drawn = report.report(folder, tmp_path)
    assert re.findall("^## .*", drawn, re.MULTILINE) == ["## Memory, Gloo", "## Memory", "## On GPUs, memory, Gloo"]
    assert drawn.count("| bytes a value | 2 workers |\n| --- | ---: |\n| Horovod fp16 | 2.0–3.0 |") == 2
    assert (
        "| bytes a value | 2 workers, GPU | 2 workers, host |" in drawn
        and "| Horovod fp16 | 2.0–3.0 | 2.0–3.0 |" in drawn
    )
    assert "On 1 GPU (a GPU), shared by 2 workers" in drawn


def test_what_was_measured_is_kept_when_the_next_layout_cannot_be(tmp_path, monkeypatch, capsys, started):
    def refused(*layout):
        raise RunError("network namespaces need root")

    monkeypatch.setattr(start, "hosts", refused)
    place = ("--layouts", "3,2x2", "--methods", "none", "--values", "10", "--output-dir", str(tmp_path))
    assert not bench(*place)
    assert "memory: network namespaces need root" in capsys.readouterr().err
    assert json.loads((tmp_path / "memory.json").read_text())["layouts"]["3"]["contenders"]["none"]


def test_a_contender_that_is_missing_is_a_dash():
    one = {"hosts": 1, "workers_per_host": 2, "contenders": {"none": [{"host": 10}], "4bit": [{"host": 25}]}}
    two = {"hosts": 2, "workers_per_host": 2, "contenders": {"none": [{"host": 30}]}}
    results = {"values": 10, "layouts": {"2": one, "2x2": two}, "about": {"command": "bench", "commit": "abc"}}
    said = memory.report(results)
    assert "| bytes a value | 2 workers | 2 hosts of 2 |" in said
    assert "| Horovod | 1.0 | 3.0 |" in said and "| ours, 4 bits | 2.5 | — |" in said


@pytest.mark.parametrize(
    ("flag", "value", "named"),
    [
        ("--layouts", "2,2x", "is not WORKERS or HOSTSxWORKERS"),
        ("--layouts", "2,1", "has a worker by itself"),
        ("--methods", "none,ddp", "'ddp' is not one of none, fp16"),
    ],
)
def test_a_bad_flag_is_one_line(flag, value, named, capsys):
    with pytest.raises(SystemExit) as ended:
        program.parse(["memory", flag, value])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and flag in said and named in said and said.count("\n") == 1
