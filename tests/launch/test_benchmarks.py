"""The benchmark programs from end to end, on tiny models; and what the report makes of figures."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

from bench import __main__ as program
from bench import alternation, kernels, memory, plots, ratios, report, tables, workloads
from bench.results import Summary, about, origin, save, summarize
from common.errors import RunError
from common.launcher import run
from netlab.hosts import why_not

BENCH = str(Path(__file__).parents[2] / "launch" / "bench")
SHORT = ("--seconds", "0", "--rounds", "2")
TRAINED = ("--dataset", "digits", "--model", "resnet8", "--epochs", "1", "--limit-train", "64", "--val-size", "64")
EVERYBODY = "alone,none,fp16,1bit,4bit,32bit,ddp,ddp-fp16,powersgd1"

needs_namespaces = pytest.mark.skipif(bool(why_not()), reason=why_not() or "namespaces can be made")


def launched(part: str, *arguments: str) -> str:
    ended = run([sys.executable, BENCH, part, *arguments], timeout=240)
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """docs/data/bench of a run over shared memory."""
    folder = tmp_path_factory.mktemp("docs") / "data" / "bench"
    place = ("--rates", "shm", "--output-dir", str(folder))
    said = launched("exchange", "--model", "tiny", "--methods", EVERYBODY, *SHORT, *place)
    assert "| Horovod fp16 |" in said and "| ours, 4 bits |" in said
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


def test_kernels(tmp_path):
    said = launched("kernels", "--values", "65536", "--rounds", "1", "--output-dir", str(tmp_path))
    found = json.loads((tmp_path / "kernels.json").read_text())
    assert found["values"] == 65536 and all(len(times) == 1 for times in found["nanoseconds"].values())
    assert "times as fast as the reference kernels" in said


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


@needs_namespaces
def test_shards_stay_within_a_host_and_only_their_gradients_means_leave_it(folder):
    shared = ("--methods", "shards-alone,hsdp,hsdp-bf16,4bit-fsdp", *SHORT, "--output-dir", str(folder))
    said = launched("sharded", "--models", "resnet20", "--rates", "1gbit,shm", *shared)
    assert "| FSDP2 bfloat16 |" in said and "2 hosts of 2 workers" in said
    results = json.loads((folder / "training-resnet20-2x2.json").read_text())
    over_link, in_memory = (results["rates"][rate]["contenders"] for rate in ("1gbit", "shm"))
    assert list(over_link) == list(in_memory) and not any(found["sent"] for found in in_memory.values())
    bits = {name: summarize(found, results["values"]).bits for name, found in over_link.items()}
    # A small model: what Horovod's barriers send shows.
    assert bits["shards-alone"] < 2 and 32 < bits["hsdp"] < 35 and 16 < bits["hsdp-bf16"] < 19
    assert 4 < bits["4bit-fsdp"] < 7


def test_over_shared_memory_hosts_of_several_workers_are_for_shards_alone(tmp_path, capsys):
    flags = ("--rates", "shm", "--methods", "hsdp,4bit-fsdp,4bit", "--output-dir", str(tmp_path))
    assert not program.run(program.parse(["sharded", *flags]))
    assert "over shm all workers are on one host" in capsys.readouterr().err


def test_our_exchange_of_shards_is_compared_with_fsdp2s_own(tmp_path):
    steps = {"shards-alone": 5.0, "hsdp": 80.0, "hsdp-bf16": 25.0, "4bit-fsdp": 10.0, "0.25bit-fsdp": 6.0}
    found = {name: {"ms": [ms], "sent": [[800, 800]]} for name, ms in steps.items()}
    results = {"benchmark": "training", "model": "transformer-short", "values": 800, "tensors": 1}
    results |= {"workers": 4, "workers_per_host": 2, "rates": {"100mbit": {"contenders": found}}}
    save(tmp_path / "training-transformer-short-2x2.json", results)
    shown = report.shown(tmp_path)
    assert "| against | link | ours, 4 bits, FSDP2 | ours, 0.25 bit, FSDP2 |" in shown["transformer-short, shards"]
    assert "| FSDP2 | 100 Mbit/s | 8.00 | 13.3 |" in shown["transformer-short, shards"]
    assert "transformer-short" not in shown["models"] and "transformer-short, training" not in shown
    drawn = report.report(tmp_path, tmp_path)
    assert "## Shards within hosts: transformer-short, 2 hosts of 2 workers" in drawn
    assert "| ours, 4 bits, FSDP2 | 4.15 | 8.00 |" in drawn and "## Training steps" not in drawn


@pytest.mark.parametrize(
    ("workers", "per_host", "rates", "named"),
    [
        ("5", "2", "1gbit", "5 workers are not several hosts of 2 each"),
        ("4", "4", "1gbit", "4 workers are not several hosts of 4 each"),
        ("4", "2", "1gbit,shm", "over shm all workers are on one host"),
    ],
)
@pytest.mark.parametrize("part", ["exchange", "training"])
def test_workers_that_cannot_be_placed_so_are_one_line(part, workers, per_host, rates, named, tmp_path, capsys):
    layout = ["--workers", workers, "--workers-per-host", per_host, "--rates", rates]
    args = program.parse([part, *layout, "--output-dir", str(tmp_path)])
    assert not program.run(args)
    said = capsys.readouterr().err
    assert named in said and said.count("\n") == 1


def test_the_goal_is_a_hosts_and_gains_are_ratios():
    steps = {"none": 80.0, "fp16": 40.0, "4bit": 10.0, "4bit-flat": 20.0}
    found = {name: {"ms": [ms], "sent": [[800, 800]]} for name, ms in steps.items()}
    results = {"values": 800, "workers": 16, "workers_per_host": 4, "rates": {"1gbit": {"contenders": found}}}
    assert "| ours, 4 bits | 6.23 | 8.00 |" in tables.bits(results)  # (4 + 0.15) * 2 * 3/4 for four hosts
    assert "| ours, 4 bits, flat |  | 8.00 |" in tables.bits(results)
    assert "| ours, 4 bits | 8.00 | 4.00 | 2.00 |" in tables.gains(results)
    assert tables.layout_title(results) == "4 hosts of 4 workers"


@needs_namespaces
def test_time_to_accuracy(folder):
    assert program.parse(["accuracy"]).methods == ("none", "fp16", "4bit", "0.25bit", "dynamic")
    chosen = ("--rate", "1gbit", "--methods", "none,dynamic")
    said = launched("accuracy", *TRAINED, *chosen, "--output-dir", str(folder))
    assert "| ours, dynamic 2-4-8 |" in said
    runs = json.loads((folder / "accuracy-resnet8-1gbit.json").read_text())["runs"]
    assert set(runs) == {"none", "dynamic"} and all(run["sent"] for run in runs.values())


def test_time_to_accuracy_without_links_beside_that_over_links(tmp_path):
    folder, figures = tmp_path / "data" / "bench", tmp_path / "figures"
    figures.mkdir()
    chosen = ("--rate", "shm", "--launcher", "gloo", "--methods", "none")
    said = launched("accuracy", *TRAINED, *chosen, "--output-dir", str(folder))
    assert "| shared memory | s to" in said and "fp16" not in said
    results = json.loads((folder / "accuracy-resnet8-shm-gloo.json").read_text())
    assert (results["rate"], results["about"]["launcher"], list(results["runs"])) == ("shm", "gloo", ["none"])
    assert "2 workers on 1 host" in said and all(run["sent"] == [] for run in results["runs"].values())
    assert "| Horovod |" in said and "| — | 32 |" in said  # nothing was counted
    save(folder / "accuracy-resnet8.json", {**results, "rate": "100mbit", "about": {"command": "x", "commit": "y"}})
    drawn = report.report(folder, figures)
    assert "## Time to accuracy: resnet8\n" in drawn
    assert "## Time to accuracy: resnet8, shared memory, Gloo\n" in drawn
    for figure in ("accuracy-resnet8.png", "accuracy-resnet8-shm-gloo.png"):
        assert f"(../figures/{figure})" in drawn and (figures / figure).exists()


@pytest.mark.parametrize(
    ("flag", "value", "named"),
    [("--rate", "fast", "'fast' is not a link rate"), ("--methods", "none,8bit", "'8bit' is not one of none, fp16")]
    + [("--methods", "fp16,4bit", "'fp16,4bit' lacks none")],
)
def test_a_bad_flag_of_the_time_to_accuracy_is_one_line(flag, value, named, capsys):
    with pytest.raises(SystemExit) as ended:
        program.parse(["accuracy", flag, value])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and flag in said and named in said and said.count("\n") == 1


def test_the_report_keeps_the_rest_of_the_page(folder):
    docs = folder.parents[1]
    page, written = docs / "benchmarks.md", docs / "tables" / "benchmarks.md"
    marks = "<!-- table tiny, training: written by make bench -->\n{}<!-- end of table -->\n"
    page.write_text(f"# Benchmarks\n\nbefore\n\n{marks.format('old')}\nafter\n")
    report.draw(docs)
    text, tables_text = page.read_text(), written.read_text()
    assert "before" in text and "after" in text and "old" not in text
    assert "| against | link | 1 bit | 4 bits | 32 bits |" in text and "| Horovod | shared memory |" in text
    assert "## The exchange alone: tiny, 2 workers" in tables_text and "## Training steps" in tables_text
    for figure in ("exchange-tiny-2-time.png", "exchange-tiny-2-speedup.png", "training-time.png"):
        assert f"(../figures/{figure})" in tables_text and (docs / "figures" / figure).stat().st_size > 1000
    report.draw(docs)
    assert (page.read_text(), written.read_text()) == (text, tables_text)


def test_ratios_are_those_of_medians_and_bold_where_ours_is_slower():
    steps = {"none": 80.0, "fp16": 400.0, "powersgd1": 5.0, "4bit": 10.0, "4bit-flat": 9.98, "0.25bit": 20.0}
    found = {name: {"ms": [ms], "sent": []} for name, ms in steps.items()}
    results = {"model": "tiny", "values": 2_000_000, "workers": 4, "workers_per_host": 2}
    results["rates"] = {"1gbit": {"contenders": found}, "shm": {"contenders": {"4bit": found["4bit"]}}}
    by_level = ratios.by_level(results)
    assert "| against | link | 4 bits | 0.25 bit |" in by_level
    assert (
        "| Horovod | 1 Gbit/s | 8.00 | 4.00 |" in by_level and "| Horovod fp16 | 1 Gbit/s | 40.0 | 20.0 |" in by_level
    )
    assert "| DDP PowerSGD r1 | 1 Gbit/s | **0.50** | **0.25** |" in by_level
    assert "| Horovod | shared memory | — | — |" in by_level
    assert "| tiny, 2.0 million values | 1 Gbit/s | 8.00 | 40.0 | **0.50** | 4.00 |" in ratios.by_model([results])
    assert "| 2 x 2 | 1 Gbit/s | 8.00 | 40.0 | **0.50** | 1.00 |" in ratios.by_layout([results])


def test_our_exchange_in_ddp_is_compared_with_its_hooks_and_with_horovod():
    steps = {"4bit": 10.0, "ddp": 80.0, "ddp-fp16": 40.0, "powersgd1": 5.0, "4bit-ddp": 8.0}
    found = {name: {"ms": [ms], "sent": [[800]]} for name, ms in steps.items()}
    results = {"values": 800, "workers": 2, "rates": {"1gbit": {"contenders": found}}}
    by_framework = ratios.by_framework(results)
    assert "| ours, 4 bits, DDP | 1 Gbit/s | 10.0 | 5.00 | **0.62** | — | 1.25 |" in by_framework
    assert "ours, 1 bit" not in by_framework
    assert "| ours, 4 bits, DDP | 4.15 | 8.00 |" in tables.bits(results)
    assert "bits, DDP" not in ratios.by_level(results)


def test_the_committed_tables_are_those_of_the_committed_figures(monkeypatch, tmp_path):
    docs = Path(BENCH).parents[1] / "docs"
    shutil.copytree(docs / "data" / "bench", tmp_path / "data" / "bench")
    shutil.copy(docs / "benchmarks.md", tmp_path)
    monkeypatch.setattr(plots, "_finish", lambda figure, *_: plots.plt.close(figure))
    report.draw(tmp_path)
    for name in ("benchmarks.md", "tables/benchmarks.md"):
        assert (tmp_path / name).read_text() == (docs / name).read_text(), f"python launch/bench draw: {name}"
    marked = set(re.findall("<!-- table (.+): ", (docs / "benchmarks.md").read_text()))
    assert marked <= report.shown(docs / "data" / "bench").keys()


def test_tables_say_when_and_with_what_and_no_commit(tmp_path):
    first, second = {"torch": "2.1", "mpi": "x"}, {"hvd_dyncomp": "0.1", "torch": "2.2"}
    notes = [
        {"versions": first},
        {"versions": first},
        {"versions": second, "date": "2026-01-02"},
        {"commit": "abc1234"},
    ]
    assert origin(notes) == " Measured with torch 2.1. Measured on 2026-01-02 with hvd_dyncomp 0.1, torch 2.2."
    assert about("x", 0, {})["date"][:2] == "20" and origin([]) == ""


def test_long_steps_get_fewer_turns_evenly_spread():
    turns = alternation.turns_of({"short": 0.1, "long": 100.0}, seconds=2.0, rounds=8)
    assert turns == {"short": 8, "long": 2}
    assert [turn for turn in range(8) if alternation.takes_part(turn, 2, 8)] == [3, 7]


def test_bits_are_a_workers_mean_and_the_median_of_steps():
    measured = {"ms": [3.0, 1.0, 2.0], "sent": [[100, 300], [200, 200], [9000, 9000]]}
    assert summarize(measured, 800) == Summary(2.0, 1.5, 2.5, 3, 2.0)


@pytest.mark.parametrize(
    "flags", [("--rates", "fast"), ("--methods", "3bits"), ("--model", "alexnet"), ("--layouts", "2x2,4")]
)
def test_a_bad_flag_is_one_line(flags, capsys):
    with pytest.raises(SystemExit) as ended:
        program.parse(["hosts", *flags])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert flags[0] in said and flags[1].split(",")[-1] in said and said.count("\n") == 1


@pytest.mark.parametrize("name", workloads.TRAINING_MODELS)
def test_every_parameter_gets_a_gradient(name):
    torch.set_num_threads(1)
    for make in (workloads.exchange, workloads.training):
        model, loss = make(name, seed=0)()
        loss(model).backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_part_that_fails_stops_no_other(tmp_path, monkeypatch, capsys):
    def fail(args):
        raise RunError("broken")

    ran = []
    monkeypatch.setattr(program, "DOCS", tmp_path)
    monkeypatch.setattr(program, "come_down_on_signals", lambda: None)
    parts = {"hosts": program.Part(memory.add_arguments), "kernels": program.PARTS["kernels"]}
    monkeypatch.setattr(program, "PARTS", parts)
    monkeypatch.setattr(memory, "run", fail)
    monkeypatch.setattr(kernels, "run", lambda args: ran.append(args.part))
    monkeypatch.setattr(report, "draw", lambda docs: ran.append("draw"))
    with pytest.raises(SystemExit) as ended:
        program.main([])
    assert ended.value.code == 2 and ran == ["kernels", "draw"]
    said = capsys.readouterr().err
    assert "hosts: broken" in said and "failed: hosts\n" in said


@pytest.mark.parametrize("flags", [["--values", "512"], ["accuracy", "--values", "512"]])
def test_flags_of_a_part_are_its_own(flags, capsys):
    with pytest.raises(SystemExit) as ended:
        program.parse(flags)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "512" in said and said.count("\n") == 1


def test_a_command_is_shown_without_the_folders_of_a_machine():
    flags = ["--data-dir", "/a", "--rate", "shm", "--output-dir=/b", "--launcher", "gloo"]
    shown = program.parse(["accuracy", *flags]).command
    assert shown == "python launch/bench accuracy --rate shm --launcher gloo"


def test_quick_is_a_little_of_everything_and_draws_nothing(monkeypatch, capsys):
    ran = {}
    monkeypatch.setattr(program, "run", lambda args: ran.setdefault(args.part, args) is not None)
    monkeypatch.setattr(program, "come_down_on_signals", lambda: None)
    program.main(["--quick"])
    assert {"kernels", "exchange", "hosts", "training", "accuracy", "memory"} <= ran.keys() and "draw" not in ran
    assert {args.output_dir for args in ran.values()} == {program.QUICK_DIR}
    whole = program.parse(["exchange"])
    assert ran["exchange"].seconds < whole.seconds and len(ran["exchange"].rates) < len(whole.rates)
    for flags in (["--quick", "draw"], ["--quick", "exchange", "--model", "tiny"]):
        with pytest.raises(SystemExit):
            program.main(flags)
        assert capsys.readouterr().err.count("\n") == 1
