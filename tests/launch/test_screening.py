"""The screening of ways to send few bits: runs on disk, and what is asked for."""

import json

import pytest

from common.errors import RunError
from study import __main__ as program
from study import record
from study import screen as screen
from study.methods import METHODS
from study.tasks import TASKS, Task


def test_runs_that_are_there_are_not_repeated(tmp_path, capsys, monkeypatch) -> None:
    task = Task("tiny", model="mlp", data="digits", limit=256, half_size=False, epochs=2)
    monkeypatch.setitem(TASKS, "tiny", task)
    path = tmp_path / "runs.jsonl"
    flags = ["screen", *["--tasks", "tiny", "--results", str(path), "--seeds", "2"]]
    program.main([*flags, "--methods", "uncompressed;1"])
    assert capsys.readouterr().out.count("\ntiny, ") == 3 and path.read_text().count("\n") == 4
    with path.open("a") as file:
        file.write('{"task": "ti')  # killed while it wrote
    program.main([*flags, "--methods", "uncompressed;1;top*0.25"])
    shown = capsys.readouterr().out.splitlines()
    assert [line.split(",")[1].strip() for line in shown[:2]] == ["top-k 0.25"] * 2
    assert [line.split("|")[1].strip() for line in shown[4:7]] == ["uncompressed", "1", "top-k 0.25"]
    assert len(record.read(path)) == 6


def test_what_is_no_run_is_named(tmp_path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text(json.dumps({"task": "t"}) + "\n")
    with pytest.raises(RunError, match="line 1"):
        record.read(path)


@pytest.mark.parametrize("flags", ["--tasks weather", "--methods 1;3/4"])
def test_an_unknown_name_is_one_line(flags: str) -> None:
    flag, names = flags.split()
    with pytest.raises(RunError, match=f"{flag}: .* is not one of those"):
        screen.chosen(flag, names, {"--tasks": TASKS, "--methods": METHODS}[flag])
