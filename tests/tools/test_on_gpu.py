"""tools/on_gpu.py, without a GPU: its limits, what it makes of checks that fail, and what it keeps.

tools/on_gpu.sh --rehearse runs all of it, Horovod's build included.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import gpu_checks  # noqa: E402
import on_gpu  # noqa: E402
from gpu_checks import Check, Checks  # noqa: E402

SAY = (sys.executable, "-c")


def check(name="it", code="print('7 passed in 1 s')", seconds=30.0, read=gpu_checks.passed, stage=1, **others):
    return Check(stage, name, (*SAY, code), seconds, read, **others)


@pytest.mark.parametrize("pretend", [False, True])
def test_stages_fit_into_the_time_that_a_machine_is_lent_for(tmp_path, pretend):
    checks = Checks(tmp_path, tmp_path, links=True, pretend=pretend).all()
    limits = {stage: sum(one.seconds for one in checks if one.stage == stage) for stage in gpu_checks.STAGES}
    assert all(0 < limit <= gpu_checks.STAGE - gpu_checks.BUILD for limit in limits.values()), limits
    assert sum(limits.values()) + gpu_checks.BUILD <= gpu_checks.ALL
    assert len({one.name for one in checks}) == len(checks), "the table has a line for each name"


def test_the_benchmarks_know_the_flags(tmp_path):
    """A lent machine is the wrong place to find out."""
    from bench import __main__ as bench
    from netlab import __main__ as netlab
    from train import options

    for pretend in (False, True):
        for one in Checks(tmp_path, tmp_path, links=True, pretend=pretend).all():
            command = list(map(str, one.command))
            if str(ROOT / "launch" / "bench") in command:
                bench.parse(command[command.index(str(ROOT / "launch" / "bench")) + 1 :])
            elif str(ROOT / "launch" / "netlab") in command:
                netlab.parse(command[command.index(str(ROOT / "launch" / "netlab")) + 1 :])
            elif any(part.endswith("train_resnet.py") for part in command):
                at = next(i for i, part in enumerate(command) if part.endswith("train_resnet.py"))
                options.parse(command[at + 1 :])
            elif "pytest" in command:
                assert [part for part in command if part.endswith(".py") and not (ROOT / part).exists()] == []


def test_one_that_fails_does_not_stop_the_others_and_none_runs_twice(tmp_path, monkeypatch, capsys):
    code = f"open({str(tmp_path / 'ran')!r}, 'a').write('x'); print('7 passed in 1 s')"
    checks = [check("bad", "raise SystemExit(3)"), check("good", code, stage=2), check("last", code, stage=5)]
    monkeypatch.setattr(Checks, "all", lambda self: checks)
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    place = ["--cache", str(tmp_path / "cache"), "--data", str(tmp_path), "--pretend"]
    assert on_gpu.main(place) == 1
    assert on_gpu.main([*place, "--stage", "1"]) == 1
    shown = capsys.readouterr().out
    assert shown.count("| 1 bad | failed |") == shown.count("| 2 good | ok | 7 passed |") == 2
    assert (tmp_path / "ran").read_text() == "xx"
    assert on_gpu.main([*place, "--stage", "5"]) == 1 and (tmp_path / "ran").read_text() == "xxx"
    kept = json.loads((tmp_path / "out" / on_gpu.ROWS).read_text())
    assert [row["state"] for row in kept["rows"] if row["name"] != "build"].count("ok") == 2
    assert "== 1 bad: failed" in (tmp_path / "out" / on_gpu.LOG).read_text()


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
