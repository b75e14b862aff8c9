"""The part "growth" of the benchmarks, on files as other parts write them, with times from the model itself."""

import math
from pathlib import Path

import pytest

from bench import __main__ as program
from bench import cost_model, growth, growth_page, report
from bench.collectives import Hosts
from bench.cost_step import step
from bench.results import load, save

VALUES = 25_557_032
RATES = {"100mbit": 95.8e6, "1gbit": 958e6, "shm": math.inf}
METHODS = ("alone", "none", "fp16", "1bit", "4bit", "8bit", "4bit-flat", "8bit-flat")
CONSTANTS = {
    **{"hand": 1.5, "copy": 0.3, "float16": 1.3, "bfloat16": 0.4, "inside": 0.2, "link": 1.02, "interface": 0.5},
    **{"cycle": 1.0, "call": 2.0, "message": 0.1, "far": 0.05, "idle": 0.15},
}
KERNELS = {f"{bits} {name}": 0.5 for bits in (1, 4, 8) for name in ("encode", "decode", "decode 2", "reduce 2")}


def exchange_file(folder: Path, workers: int, per_host: int, *rates: str, slower: float = 1.0, name: str = "") -> None:
    """What the exchange benchmark would have written; `slower` times slower than the model."""
    found = {}
    for rate in rates:
        hosts = Hosts(1, workers) if rate == "shm" else Hosts(workers // per_host, per_host)
        place = cost_model.Machine(hosts, 2 / hosts.number, RATES[rate])
        methods = {"ddp": {"ms": [1.0], "sent": []}}
        for method in METHODS:
            ms = 1e3 * slower * cost_model.seconds(step(method, VALUES, hosts), place, CONSTANTS, KERNELS)
            methods[method] = {"ms": [0.9 * ms, ms, 3 * ms], "sent": []}
        payload = None if rate == "shm" else RATES[rate] / 1e6
        about = {"machine": {"cores": 2}, "payload_mbit": payload, "launcher": "gloo" if name else "mpirun"}
        found[rate] = {"contenders": methods, "about": about}
    what = {"workers": workers, "workers_per_host": per_host, "values": VALUES, "tensors": 161, "model": "resnet50"}
    save(folder / f"exchange-resnet50-{workers // per_host}x{per_host}{name}.json", {**what, "rates": found})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "data" / "bench"
    save(found / "kernels.json", {"nanoseconds": {name: [ns, ns, 9 * ns] for name, ns in KERNELS.items()}})
    for workers, per_host in ((2, 1), (4, 1), (8, 1), (4, 2), (8, 4)):
        exchange_file(found, workers, per_host, "100mbit", "1gbit", *(("shm",) if workers == 2 else ()))
    return found


def grown(folder: Path, *flags: str) -> dict:
    args = program.parse(["growth", "--output-dir", str(folder), *flags])
    assert program.run(args)
    return load(folder / growth.FILE)


def test_what_is_not_to_be_seen_is_predicted_and_not_fitted(folder):
    first = grown(folder)
    assert {(row["layout"], row["rate"]) for row in first["unseen"]} == {("2x4", "1gbit")}
    assert ("2x4", "1gbit") not in {(row["layout"], row["rate"]) for row in first["seen"]}
    assert [row["contender"] for row in first["unseen"]] == list(METHODS)
    for row in first["seen"] + first["unseen"]:
        assert abs(growth_page.deviation(row)) < 2, row
    exchange_file(folder, 8, 4, "1gbit", slower=10.0)  # and no other rate
    exchange_file(folder, 8, 2, "100mbit")
    lied = grown(folder)
    assert all(growth_page.deviation(row) == pytest.approx(-90, abs=1) for row in lied["unseen"])
    assert lied["constants"]["hand"] == pytest.approx(first["constants"]["hand"], rel=0.05)
    # Seen, the same lie shows in the constants.
    seen = grown(folder, "--unseen", "2x1@1gbit")
    assert max(abs(growth_page.deviation(row)) for row in seen["seen"]) > 20


def test_a_step_of_another_launcher_or_contender_is_no_point(folder):
    before = grown(folder)["seen"]
    exchange_file(folder, 4, 2, "100mbit", slower=10.0, name="-gloo")
    after = grown(folder)["seen"]
    assert after == before and all(row["contender"] in METHODS for row in after)


def test_tables_and_figures_are_drawn_with_predictions_apart(folder, capsys):
    grown(folder)
    said = capsys.readouterr().out
    for path in folder.glob("exchange-*.json"):  # they have sections of their own, which other tests look at
        path.unlink()
    (folder / "kernels.json").unlink()
    docs = folder.parents[1]
    report.draw(docs)
    text = (docs / "tables" / "growth.md").read_text()
    measured, predicted = text.split("## Growth: predicted, not measured")
    assert "## Growth: a model of what was measured" in measured and "| not seen by the fit |" in measured
    assert "| 2x4, 1 Gbit/s, Horovod fp16 |" in measured and "| `bfloat16` |" in measured
    assert "Nothing below was measured" in predicted and "| 128x8 |" in predicted and "| bucket, MiB |" in predicted
    for gbit in (1, 10, 25, 100):
        assert f"| ms per step, {gbit} Gbit/s |" in predicted and f"ms per step, {gbit} Gbit/s" not in measured
    for figure in ("growth.png", "growth-fit.png"):
        assert f"(../figures/{figure})" in text and (docs / "figures" / figure).stat().st_size > 5000
    assert "| bucket, MiB |" in said


def test_the_tables_of_predictions_hold_what_the_file_holds(folder):
    results = grown(folder)
    [row] = [r for r in results["predicted"] if (r["hosts"], r["workers"], r["contender"]) == (8, 4, "none")]
    cell = f"{row['ms']['10gbit']:.0f} ({row['assumed_ms']['10gbit']:.0f})"
    assert f"| 8x4 | {cell} |" in growth_page.times(results, "10gbit")
    assert f"| 8x4 | {row['leaving_bytes'] / 1e6:.1f} |" in growth_page.sent(results)
    assert row["leaving_bytes"] == pytest.approx(2 * 7 / 8 * 4 * VALUES)


def test_too_little_measured_is_one_line(folder, capsys):
    (folder / "exchange-resnet50-2x4.json").unlink()
    assert not program.run(program.parse(["growth", "--output-dir", str(folder)]))
    said = capsys.readouterr().err
    assert "2x4@1gbit has not been measured" in said and said.count("\n") == 1
    (folder / "exchange-resnet50-2x2.json").unlink()
    flags = ["--output-dir", str(folder), "--unseen", "2x1@1gbit"]
    assert not program.run(program.parse(["growth", *flags]))
    assert "nothing measured tells bfloat16" in capsys.readouterr().err
    (folder / "kernels.json").unlink()
    assert not program.run(program.parse(["growth", *flags]))
    assert "no kernels.json" in capsys.readouterr().err


def test_a_bad_layout_is_one_line(capsys):
    with pytest.raises(SystemExit) as ended:
        program.parse(["growth", "--unseen", "2x4,1gbit"])
    assert ended.value.code == 2 and "2x4" in capsys.readouterr().err
