"""The benchmark programs from end to end, on tiny models; and what the report makes of figures."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from bench import __main__ as program
from bench import changing, plots, report
from bench.results import Summary, save, summarize
from common.launcher import run
from hvd_dyncomp.commands.probe import turns
from netlab.hosts import why_not

BENCH = str(Path(__file__).parents[2] / "launch" / "bench")
SHORT = ("--seconds", "0", "--rounds", "2")
EVERYBODY = "alone,none,fp16,1bit,4bit,32bit,ddp,ddp-fp16,ddp-bf16,powersgd1,4bit-ddp-x4"

needs_namespaces = pytest.mark.skipif(bool(why_not()), reason=why_not() or "namespaces can be made")


def launched(part: str, *arguments: str, **environment: str) -> str:
    ended = run([sys.executable, BENCH, part, *arguments], timeout=240, env={**os.environ, **environment})
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """docs/data/bench of a run over shared memory."""
    folder = tmp_path_factory.mktemp("docs") / "data" / "bench"
    place = ("--rates", "shm", "--output-dir", str(folder))
    said = launched("exchange", "--model", "tiny", "--methods", EVERYBODY, *SHORT, *place)
    assert (
        "| Horovod fp16 |" in said and "| ours, 4 bits |" in said and "| ours, 4 bits, DDP, every 4th batch |" in said
    )
    measured = json.loads((folder / "exchange-tiny-2.json").read_text())
    save(folder / "training-tiny-2.json", {**measured, "benchmark": "training"})
    return folder


def test_every_contender_is_measured(folder):
    results = json.loads((folder / "exchange-tiny-2.json").read_text())
    measured = results["rates"]["shm"]["contenders"]
    assert list(measured) == EVERYBODY.split(",")
    assert all(len(found["ms"]) == 2 and min(found["ms"]) > 0 for found in measured.values())
    about = results["rates"]["shm"]["about"]
    assert about["command"].startswith("python launch/bench exchange --model tiny")
    assert about["commit"] and about["versions"]["torch"] and about["environment"]["HOROVOD_CYCLE_TIME"] == "1"
    assert results["values"] == 784 * 16 + 16 + 16 * 10 + 10


@pytest.mark.thorough
def test_kernels(tmp_path):
    said = launched("kernels", "--values", "65536", "--rounds", "1", "--output-dir", str(tmp_path))
    found = json.loads((tmp_path / "kernels.json").read_text())
    assert found["values"] == 65536 and all(len(times) == 1 for times in found["nanoseconds"].values())
    assert "times as fast as the reference kernels" in said


@pytest.fixture
def without_horovod(tmp_path) -> dict[str, str]:
    """An environment in which there is no Horovod to import, and nothing to draw with."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules.update(horovod=None, matplotlib=None)\n")
    return {"PYTHONPATH": str(tmp_path)}


@pytest.mark.thorough
def test_torchrun_does_without_horovod(without_horovod, tmp_path):
    """By default with all methods that can, and with DDP's in place of Horovod's."""
    place = ("--rates", "shm", "--output-dir", str(tmp_path))
    said = launched("exchange", "--launcher", "torchrun", "--model", "tiny", *SHORT, *place, **without_horovod)
    assert "Horovod" not in said and "HOROVOD" not in said and "| DDP PowerSGD r4 |" in said
    results = json.loads((tmp_path / "exchange-tiny-2-torchrun.json").read_text())
    measured, about = results["rates"]["shm"]["contenders"], results["rates"]["shm"]["about"]
    levels = [f"{bits}bit-ddp" for bits in (0.25, 1, 2, 4, 8, 16, 32)]
    assert list(measured) == ["alone", "ddp", "ddp-fp16", *levels, "powersgd1", "powersgd4"]
    assert all(len(found["ms"]) == 2 and min(found["ms"]) > 0 for found in measured.values())
    assert about["launcher"] == "torchrun" and about["versions"].keys() == {"python", "torch", "hvd_dyncomp", "wire"}


def test_what_needs_horovod_is_refused_without_it(capsys):
    for part, methods in (("exchange", "none,ddp,1bit-flat,4bit"), ("memory", "fp16")):
        with pytest.raises(SystemExit) as ended:
            program.parse([part, "--launcher", "torchrun", f"--methods={methods}"])
        said = capsys.readouterr().err
        assert ended.value.code == 2 and said.count("\n") == 1
        wrong = ",".join(name for name in methods.split(",") if name != "ddp")
        assert f"--methods {wrong}: " in said and "there are " in said
        assert ("hsdp" in said.partition("there are ")[2]) == (part == "exchange")
        assert not re.search(r"\b(none|4bit|1bit-flat)[,\n]", said.partition("there are ")[2])
    with pytest.raises(SystemExit):
        program.parse(["changing", "--launcher", "mpirun"])
    assert "'mpirun'" in capsys.readouterr().err


@pytest.mark.thorough
@needs_namespaces
def test_over_links_torchruns_bytes_are_counted(without_horovod, tmp_path):
    place = ("--rates", "1gbit", "--output-dir", str(tmp_path))
    chosen = ("--model", "resnet20", "--methods", "alone,ddp,ddp-bf16,4bit-ddp")
    launched("exchange", "--launcher", "torchrun", *chosen, *SHORT, *place, **without_horovod)
    results = json.loads((tmp_path / "exchange-resnet20-2-torchrun.json").read_text())
    measured = results["rates"]["1gbit"]["contenders"]
    bits = {name: summarize(found, results["values"]).bits for name, found in measured.items()}
    assert bits["alone"] < 0.1 and 32 < bits["ddp"] < 34 and 16 < bits["ddp-bf16"] < 18 and 4 < bits["4bit-ddp"] < 4.6


@pytest.mark.thorough
@needs_namespaces
def test_over_links_bytes_are_counted_and_other_rates_kept(folder):
    place = ("--rates", "2gbit,1gbit", "--output-dir", str(folder))
    launched("exchange", "--model", "resnet20", "--methods", "none,4bit,ddp,4bit-ddp", *SHORT, *place)
    results = json.loads((folder / "exchange-resnet20-2.json").read_text())
    for rate in ("2gbit", "1gbit"):
        assert results["rates"][rate]["about"]["payload_mbit"] > 0
        measured = results["rates"][rate]["contenders"]
        bits = {name: summarize(found, results["values"]).bits for name, found in measured.items()}
        # A small model: what Horovod's ranks tell each other meanwhile shows. test_wire_bytes.py is strict.
        assert 32 < bits["none"] < 40 and 32 < bits["ddp"] < 40
        assert 4 < bits["4bit"] < 8 and 4 < bits["4bit-ddp"] < 6


@pytest.mark.soak  # test_hosts_bytes.py counts every day
@needs_namespaces
def test_on_hosts_of_several_workers_the_hosts_bytes_are_counted(folder):
    shared = ("--methods", "none,4bit,4bit-flat,ddp-fp16", *SHORT, "--output-dir", str(folder))
    said = launched("hosts", "--model", "resnet20", "--layouts", "2x2", "--rates", "1gbit", *shared)
    assert "| ours, 4 bits, flat |" in said and "2 hosts of 2 workers" in said
    results = json.loads((folder / "exchange-resnet20-2x2.json").read_text())
    assert (results["workers"], results["workers_per_host"]) == (4, 2)
    measured = results["rates"]["1gbit"]["contenders"]
    assert all(len(step) == 2 for found in measured.values() for step in found["sent"])  # one counter a host
    bits = {name: summarize(found, results["values"]).bits for name, found in measured.items()}
    # A small model: what Horovod's ranks tell each other shows. tests/launch/test_hosts_bytes.py is strict.
    assert 32 < bits["none"] < 45 and 24 < bits["ddp-fp16"] < 45
    assert 4 < bits["4bit"] < bits["4bit-flat"] - 2


@pytest.mark.soak  # ddp/test_bytes.py counts every day
@needs_namespaces
def test_shards_stay_within_a_host_and_only_their_gradients_means_leave_it(folder):
    shared = ("--methods", "shards-alone,hsdp-bf16,4bit-fsdp", *SHORT, "--output-dir", str(folder))
    said = launched("sharded", "--models", "resnet20", "--rates", "1gbit", "--launcher", "torchrun", *shared)
    assert "| FSDP2 bfloat16 |" in said and "2 hosts of 2 workers" in said
    results = json.loads((folder / "training-resnet20-2x2-torchrun.json").read_text())
    over_link = results["rates"]["1gbit"]["contenders"]
    bits = {name: summarize(found, results["values"]).bits for name, found in over_link.items()}
    # A small model: what barriers send shows.
    assert bits["shards-alone"] < 2 and 16 < bits["hsdp-bf16"] < 19
    assert 4 < bits["4bit-fsdp"] < 7


def test_the_report_keeps_the_rest_of_the_page(folder):
    docs = folder.parents[1]
    page, written = docs / "benchmarks.md", docs / "tables" / "benchmarks.md"
    marks = "<!-- table models: written by make bench -->\n{}<!-- end of table -->\n"
    page.write_text(f"# Benchmarks\n\nbefore\n\n{marks.format('old')}\nafter\n")
    report.draw(docs)
    text, tables_text = page.read_text(), written.read_text()
    assert "before" in text and "after" in text and "old" not in text
    assert "| model | link | 4 bits: Horovod |" in text and "million values | shared memory |" in text
    assert "## The exchange alone: tiny, 2 workers" in tables_text and "## Training steps" in tables_text
    report.draw(docs)
    assert (page.read_text(), written.read_text()) == (text, tables_text)


def test_the_committed_tables_are_those_of_the_committed_figures(monkeypatch, tmp_path):
    docs = Path(BENCH).parents[1] / "docs"
    shutil.copytree(docs / "data" / "bench", tmp_path / "data" / "bench")
    for name in report.FILLED:
        shutil.copy(docs / name, tmp_path)
    for drawn in ("steps_by_link", "memories"):
        monkeypatch.setattr(plots, drawn, lambda *_: None)
    report.draw(tmp_path)
    shown = report.shown(docs / "data" / "bench").keys()
    for name in (*report.FILLED, "tables/benchmarks.md"):
        assert (tmp_path / name).read_text() == (docs / name).read_text(), f"python launch/bench draw: {name}"
        assert set(re.findall("<!-- table (.+): ", (docs / name).read_text())) <= shown


def test_what_the_pages_show_is_of_this_wire_version():
    """All that `launch/bench` measures without a GPU."""
    assert not program.missing()


def test_link_aware_is_compared_with_the_level_that_was_best_in_all_and_at_the_end():
    def phase(rate: str, bits: list[float], *seconds: tuple[float, float, float]) -> dict:
        named = [dict(zip(("4bit-ddp", "LinkAware", "8bit-ddp"), each, strict=True)) for each in seconds]
        epochs = [{"seconds": each, "bits": level, "waited": 0.1} for each, level in zip(named, bits, strict=True)]
        return {"rate": rate, "epochs": epochs}

    fast = phase("none", [8, 16], (2, 2.5, 1.5), (2, 1.4, 1.5))
    slow = phase("100mbit", [16, 4, 4, 4, 4, 4], (2, 9, 4), *[(2, 2.1, 4)] * 5)
    results = {"model": "tiny", "steps": 10, "values": 100, "about": {"command": "x"}, "phases": [fast, slow]}
    rows = [row.strip("| ").split(" | ") for row in changing.report(results).splitlines()[2:5]]
    assert rows == [
        ["no limit", "2", "4.0", "3.0", "3.9", "1.30, 1.30", "8 16"],
        ["100 Mbit/s", "6", "12.0", "24.0", "19.5", "1.62, 1.05", "16 4 (x5)"],
        ["all", "8", "16.0", "27.0", "23.4", "1.46"],
    ]


@pytest.mark.thorough
@needs_namespaces
def test_a_link_that_changes_is_followed(tmp_path):
    chosen = ("--methods", "4bit-ddp", "--phases", "none:2,20mbit:2", "--steps", "3")
    said = launched("changing", *chosen, "--output-dir", str(tmp_path))
    fast, slow = (phase["epochs"] for phase in json.loads((tmp_path / "changing-pauses.json").read_text())["phases"])
    assert [len(fast), len(slow)] == [2, 2] and "| 20 Mbit/s | 2 |" in said
    assert all(epoch["seconds"].keys() == {"4bit-ddp", "LinkAware"} for epoch in fast + slow)
    # 0.1 s of sleep a step; 2 bits for each of 1.5 million values take 0.15 s.
    assert min(epoch["waited"] for epoch in slow) > 0.3 and slow[1]["bits"] <= slow[0]["bits"]


def test_long_steps_get_fewer_turns_evenly_spread():
    found = turns.turns_of({"short": 0.1, "long": 100.0}, seconds=2.0, rounds=8)
    assert found == {"short": 8, "long": 2}
    assert [turn for turn in range(8) if turns.takes_part(turn, 2, 8)] == [3, 7]


def test_bits_are_a_workers_mean_and_the_median_of_steps():
    measured = {"ms": [3.0, 1.0, 2.0], "sent": [[100, 300], [200, 200], [9000, 9000]]}
    assert summarize(measured, 800) == Summary(2.0, 1.5, 2.5, 3, 2.0)
    assert summarize(measured, 800, batches=4) == Summary(0.5, 0.375, 0.625, 3, 2.0)


@pytest.mark.parametrize(
    "flags", [("--rates", "fast"), ("--methods", "3bits"), ("--model", "alexnet"), ("--layouts", "2x2,4")]
)
def test_a_bad_flag_is_one_line(flags, capsys):
    with pytest.raises(SystemExit) as ended:
        program.parse(["hosts", *flags])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert flags[0] in said and flags[1].split(",")[-1] in said and said.count("\n") == 1


def test_quick_is_a_little_of_everything_and_draws_nothing(monkeypatch, capsys):
    ran = {}
    monkeypatch.setattr(program, "run", lambda args: ran.setdefault(args.part, args) is not None)
    monkeypatch.setattr(program, "come_down_on_signals", lambda: None)
    program.main(["--quick"])
    assert {"kernels", "exchange", "hosts", "training", "growth", "memory"} <= ran.keys() and "draw" not in ran
    assert {args.output_dir for args in ran.values()} == {program.QUICK_DIR}
    whole = program.parse(["exchange"])
    assert ran["exchange"].seconds < whole.seconds and len(ran["exchange"].rates) < len(whole.rates)
    for flags in (["--quick", "draw"], ["--all", "exchange", "--model", "tiny"]):
        with pytest.raises(SystemExit):
            program.main(flags)
        assert capsys.readouterr().err.count("\n") == 1
