"""tools/on_gpu.py, without a GPU: its limits, what it makes of checks that fail, and what it keeps.

tools/on_gpu.sh --rehearse runs all of it, Horovod's build included.
"""

import gzip
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tools")]

import gpu_checks  # noqa: E402
import on_gpu  # noqa: E402
from gpu_checks import Check, Checks  # noqa: E402

pytestmark = pytest.mark.thorough

SAY = (sys.executable, "-c")


def check(name="it", code="print('7 passed in 1 s')", seconds=30.0, read=gpu_checks.passed, stage="A", **others):
    return Check(stage, name, (*SAY, code), seconds, read, **others)


def checks_of(folder, pretend):
    return Checks(folder, folder / "built", backend="nccl", links=True, pretend=pretend).all()


@pytest.mark.parametrize("pretend", [False, True])
def test_a_stage_whose_checks_all_hang_leaves_time_for_others(tmp_path, pretend):
    checks = checks_of(tmp_path, pretend)
    limits = {stage: sum(one.seconds for one in checks if one.stage == stage) for stage in "ABCD"}
    slow = gpu_checks._SLOW if pretend else 1
    assert all(0 < limit <= 0.6 * slow * gpu_checks.ALL for limit in limits.values()), limits
    assert len({one.name for one in checks}) == len(checks), "the table has a line for each name"


def test_the_benchmarks_know_the_flags(tmp_path):
    """A lent machine is the wrong place to find out."""
    from bench import __main__ as bench
    from netlab import __main__ as netlab

    for one in [*checks_of(tmp_path, False), *checks_of(tmp_path, True)]:
        command = list(map(str, one.command))
        for folder, program in ("bench", bench), ("netlab", netlab):
            if str(ROOT / "launch" / folder) in command:
                program.parse(command[command.index(str(ROOT / "launch" / folder)) + 1 :])
        assert [part for part in command if part.endswith(".py") and not (ROOT / part).exists()] == []


def test_what_is_checked_over_nccl_is_there(tmp_path):
    """All tests of the file are in a check, and each check has a test."""
    text = (ROOT / gpu_checks._ON_RANKS / "test_nccl.py").read_text()
    tests = re.findall(r"^def (test_\w+)", text, flags=re.MULTILINE)
    found = {test: [keyword for keyword in gpu_checks._OVER_NCCL.values() if keyword in test] for test in tests}
    assert all(len(keywords) == 1 for keywords in found.values()), found
    assert len(tests) == len(gpu_checks._OVER_NCCL)


def place(folder: Path) -> list[str]:
    return ["--cache", str(folder / "cache"), "--built", str(folder / "built"), "--pretend"]


def test_one_that_fails_does_not_stop_the_others_and_none_runs_twice(tmp_path, monkeypatch, capsys):
    code = f"open({str(tmp_path / 'ran')!r}, 'a').write('x'); print('7 passed in 1 s')"
    checks = [check("bad", "raise SystemExit(3)"), check("good", code, stage="B"), check("last", code, stage="E")]
    checks.append(check("old", code, stage="E", lack="too old"))
    monkeypatch.setattr(Checks, "all", lambda self: checks)
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    assert on_gpu.main(place(tmp_path)) == 1
    assert on_gpu.main([*place(tmp_path), "--stage", "A"]) == 1
    shown = capsys.readouterr().out
    assert shown.count("| A bad | failed |") == shown.count("| B good | ok | 7 passed |") == 2
    assert shown.count("| E old | not here | too old |") == 2
    assert (tmp_path / "ran").read_text() == "xx"
    assert on_gpu.main([*place(tmp_path), "--stage", "E"]) == 1 and (tmp_path / "ran").read_text() == "xxx"
    kept = json.loads((tmp_path / "out" / on_gpu.ROWS).read_text())
    assert [row["state"] for row in kept["rows"]].count("ok") == 2
    assert "== A bad: failed" in (tmp_path / "out" / on_gpu.LOG).read_text()


def test_the_time_ends_whatever_runs(tmp_path, monkeypatch, capsys):
    """And what has not begun is not begun any more; results until then are kept."""
    monkeypatch.setattr(on_gpu, "_LEAST", 1.0)
    checks = [check("quick"), check("long", "import time; time.sleep(60)", stage="B"), check("never", stage="C")]
    monkeypatch.setattr(Checks, "all", lambda self: checks)
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    began = time.monotonic()
    assert on_gpu.main([*place(tmp_path), "--seconds", "4"]) == 1
    assert time.monotonic() - began < 30
    kept = json.loads((tmp_path / "out" / on_gpu.ROWS).read_text())
    assert [row["state"] for row in kept["rows"]] == ["ok", "too late", "no time"]


def test_what_a_profile_says_of_overlap(tmp_path):
    def event(name, ts, dur, cat):
        return {"ph": "X", "name": name, "ts": ts, "dur": dur, "cat": cat}

    events = [event("ncclDevKernel_SendRecv", 0, 2000, "kernel"), event("ncclKernel_AllReduce", 1000, 3000, "kernel")]
    events += [event("gemm", 3000, 500, "kernel"), event("gemm", 3200, 2000, "kernel")]
    events += [event("hvd_dyncomp.encode", 0, 5, "user_annotation"), event("hvd_dyncomp.encode", 0, 5, "cpu_op")]
    events += [event("hvd_dyncomp.catch_up", 9, each, "user_annotation") for each in (1000, 3000)]
    with gzip.open(tmp_path / "it.gz", "wt") as file:
        json.dump({"traceEvents": [*events, {"ph": "M"}]}, file)
    said = gpu_checks.overlap(tmp_path / "it.gz")
    assert said == "1 buckets encoded, 2.0 ms of waiting a step, NCCL 4.0 ms, 25 % of it beside other kernels"


def test_without_what_it_needs_it_says_so(tmp_path):
    (tmp_path / "tools").mkdir()
    for name in ("on_gpu.sh", "gpu.sh"):
        shutil.copy(ROOT / "tools" / name, tmp_path / "tools")
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHON": sys.executable}

    def said() -> str:
        done = subprocess.run(
            [tmp_path / "tools" / "on_gpu.sh"], env=environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 1
        return done.stderr

    assert "tools/gpu-pack is missing: make gpu-pack" in said()
    (tmp_path / "tools" / "gpu-pack").mkdir()
    assert "sees no GPU; tools/on_gpu.sh --rehearse does without" in said()
    environment["PYTHON"] = "/bin/false"
    assert "/bin/false has no torch" in said()
