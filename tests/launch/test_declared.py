"""The declared study: that it can be run, that nothing is run twice, and that what is committed is what came of it."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from study import __main__ as study
from study import compared, declared, paper_table, record
from study.declared import PARTS, QUICK
from study.methods import METHODS
from study.parts import BASELINE, TUNING, Largest, Part, Tuned
from study.tasks import TASKS, Task

pytestmark = pytest.mark.soak  # research: what it has found is on the pages

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
COMMITTED = DOCS / study.RESULTS


def made_up(part: Part, seeds: int = 2) -> dict[record.Key, dict]:
    """Runs of a part: each method a point and 1 % of loss worse than the one before, and seed 1 half a point better."""
    numbers = {"bits": 2.0, "values": 1000, "steps": 10, "seconds": 1.0}
    return {
        (task, method, seed): {
            **{"task": task, "contender": method, "seed": seed, "score": 90.0 - place + seed / 2, **numbers},
            "all_bits": 32 / (place + 1),
            "loss": 2.0 * (1 + place / 100),
        }
        for task in part.tasks
        for place, method in enumerate(part.methods)
        for seed in range(seeds)
    }


@pytest.mark.parametrize("part", [*PARTS, *QUICK], ids=lambda part: part.name)
def test_what_is_declared_exists(part: Part) -> None:
    assert set(part.tasks) <= TASKS.keys()
    assert set(part.methods) <= METHODS.keys()
    assert BASELINE in part.methods
    assert len(set(part.keys)) == len(part.keys)


def test_all_that_exists_is_declared() -> None:
    assert {method for part in PARTS for method in part.methods} == METHODS.keys()
    assert {task for part in PARTS for task in part.tasks} == TASKS.keys()


def test_committed_runs_are_declared_and_compact() -> None:
    runs = record.read(COMMITTED)
    assert runs.keys() <= set(declared.keys(PARTS))
    assert len(runs) == COMMITTED.read_text().count("\n")
    fields = {"task", "contender", "seed", "score", "loss", "bits", "all_bits", "values", "steps", "seconds"}
    assert all(run.keys() - {"curve", "residuals"} == fields for run in runs.values())  # which older ones have not
    assert {run.get("residuals", "float32") for run in runs.values()} == {"float32", "bfloat16"}
    assert all(run["curve"][-1] == pytest.approx(run["score"], abs=1e-3) for run in runs.values() if "curve" in run)


def test_the_runs_of_former_codes_are_kept_in_a_file_of_their_own_each_once() -> None:
    path = COMMITTED.with_name("before_13.jsonl")
    assert len(record.read(path)) == path.read_text().count("\n") > 2000


def test_committed_tables_are_what_the_committed_runs_give(tmp_path: Path) -> None:
    pages = (study.PAGE, f"tables/{study.PAGE}", paper_table.TABLE)
    for name in (*pages, paper_table.RESULTS):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(DOCS / name, tmp_path / name)
    study.write_pages(tmp_path, compared.tables(PARTS, record.read(COMMITTED)))
    for name in pages:
        assert (tmp_path / name).read_text() == (DOCS / name).read_text(), f"python launch/study --tables-only: {name}"
    page, tables = (
        re.findall("<!-- table (.+): written by make study -->", (DOCS / name).read_text()) for name in pages[:2]
    )
    assert sorted([*page, *tables]) == sorted(part.name for part in PARTS) and page and tables


def table_of(part: Part, runs: dict) -> list[str]:
    return compared.tables([part], runs)[part.name].splitlines()


def test_several_tasks_have_a_cell_each_that_says_of_how_few_runs_it_is() -> None:
    part = Part("x", ("mlp", "resnet8, short"), ("uncompressed", "4"))
    runs = {**made_up(part, 3), **made_up(Part("y", ("mlp",), part.methods), 3)}
    del runs["mlp", "4", 2]
    assert table_of(part, runs)[3] == "| 4 | 16.00 | +1.00 ± 0.00 (-1.00) ×2 | +1.00 ± 0.00 (-1.00) |"
    assert table_of(part, {})[0].startswith("0 of 12 runs")


def test_a_run_that_diverged_is_counted_and_no_mean_leaves_it_out() -> None:
    part = Part("x", ("mlp",), ("uncompressed", "4"))
    runs = made_up(part, 3)
    runs["mlp", "4", 1]["loss"] = float("nan")
    assert table_of(part, runs)[3] == "| 4 | 16.00 | diverged: 1 of 3 | -1.00 | 3 |"


def test_nesterovs_momentum_is_compared_with_itself_uncompressed() -> None:
    part = Part("x", ("mlp",), ("uncompressed", "4", "uncompressed, Nesterov", "1, Nesterov"))
    table = table_of(part, made_up(part, 2))
    assert [line.split(" | ")[2] for line in table[3:6]] == ["+1.00 ± 0.00", "+2.00 ± 0.00", "+0.98 ± 0.00"]
    assert "Nesterov" in table[-1]


def test_a_standard_error_is_that_of_the_mean_of_differences() -> None:
    part = Part("x", ("mlp",), ("uncompressed", "4"))
    runs = made_up(part, 3)
    for seed, loss in enumerate((2.0, 2.02, 2.04)):  # 0, 1 and 2 % above
        runs["mlp", "4", seed]["loss"] = loss
    assert "| +1.00 ± 0.58 |" in table_of(part, runs)[3]


def scored(part: Tuned | Largest, score, seeds: list[int] | None = None) -> dict[record.Key, dict]:
    """Runs of a part, of which `score` says what they end at, by (task, method, seed)."""
    numbers = {"loss": 1.0, "bits": 2.0, "all_bits": 2.0, "values": 1000, "steps": 10, "seconds": 1.0}
    return {
        key: {**dict(zip(("task", "contender", "seed"), key, strict=True)), "score": score(*key), **numbers}
        for key in part.keys
        if seeds is None or key[2] in seeds
    }


FEW = ("1/4, no momentum", "1/4, no momentum, c = 0.5")
TUNED = Tuned("x", "mlp", {"uncompressed": ("uncompressed",), "few": FEW, "8": ("8",)}, 4)


def by_rate(task: str, method: str, seed: int) -> float:
    """Uncompressed gradients are at their best at the task's rate, others at twice that, half a point worse."""
    best = {"uncompressed": "mlp", FEW[0]: "mlp, x2", FEW[1]: "mlp, x4", "8": "mlp, x2"}[method]
    return 90.0 - (task != best) - 0.5 * (method != "uncompressed") - (method == FEW[0]) + seed % 2 * 0.1


def test_rates_are_chosen_with_seeds_that_nothing_is_compared_with() -> None:
    assert not set(TUNING) & set(TUNED.seeds_fresh)
    shown = (declared.WITH_NESTEROV, declared.SHORT_WARM_UPS, declared.RESNET18)  # at a rate that nothing chose here
    others = [part for part in PARTS if isinstance(part, Part) and part not in shown]
    assert not {key[2] for part in others for key in part.keys} & {*TUNING, *TUNED.seeds_fresh}
    runs = scored(TUNED, by_rate, list(TUNING))
    assert [TUNED.best(runs, row) for row in TUNED.rows] == [
        *(("mlp", "uncompressed"), ("mlp, x4", FEW[1]), ("mlp, x2", "8"))
    ]
    del runs["mlp, x0.5", FEW[0], TUNING[0]]
    assert TUNED.best(runs, "few") is None, "a rate that was not tried may be the best"


def test_a_table_may_choose_among_fewer_rates_with_fewer_seeds() -> None:
    few = replace(TUNED, rates=(0.5, 1), tuning_seeds=TUNING[:1])
    runs = scored(few, by_rate)
    assert {(task, seed) for task, _, seed in runs if seed in TUNING} == {("mlp, x0.5", 100), ("mlp", 100)}
    assert few.best(runs, "8") == ("mlp, x0.5", "8"), "the first of two equal ones: twice the rate was not tried"
    assert "8 of 8 runs that choose rates (seeds 100)" in compared.tables([few], runs)["x"]


def test_fresh_runs_are_wanted_at_the_best_rate_only() -> None:
    runs: dict = {}
    stages = []
    while lacking := [key for key in TUNED.wanted(runs) if key not in runs]:
        stages.append(lacking)
        runs |= {key: run for key, run in scored(TUNED, by_rate).items() if key in lacking}
    assert [{key[1] for key in stage} for stage in stages] == [
        {"uncompressed", *FEW, "8"},
        {"uncompressed", FEW[1], "8"},
    ]
    assert [key for key in stages[1] if key[1] == "8"] == [("mlp, x2", "8", seed) for seed in (10, 11, 12, 13)]
    assert len(runs) == 4 * 4 * 2 + 3 * 4


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A declared study of two runs a seed, and a folder for what comes of it."""
    task = Task("tiny", "mlp", data="digits", limit=256, half_size=False, epochs=2)
    part = Part("main", ("tiny",), ("uncompressed", "1/4, no momentum"), seeds=2)
    monkeypatch.setitem(TASKS, "tiny", task)
    monkeypatch.setattr(declared, "PARTS", (part,))
    monkeypatch.setattr(declared, "QUICK", (Part("main", ("tiny",), ("uncompressed", "1/4, no momentum"), seeds=1),))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_quick_study_from_beginning_to_end(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study.main(["--quick", "--jobs", "1"])
    said = capsys.readouterr().out
    assert "| 0.25, no momentum | 0." in said and "2 of 2 runs" in said
    folder = tiny / study.QUICK_DIR
    written = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
    assert written == {study.RESULTS}
    runs = record.read(folder / study.RESULTS)
    assert len(runs) == 2
    assert all(len(run["curve"]) == 2 for run in runs.values())
    assert [run["curve"][-1] for run in runs.values()] == pytest.approx(
        [run["score"] for run in runs.values()], abs=1e-3
    )
    assert list(tiny.iterdir()) == [tiny / "runs"]


def test_what_is_there_is_not_trained_again(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tiny / "out" / study.PAGE
    page.parent.mkdir()
    page.write_text("<!-- table main: written by make study -->\n<!-- end of table -->\n")
    flags = ["--jobs", "1", "--output-dir", str(tiny / "out")]
    study.main(flags)
    trained, text = (tiny / "out" / study.RESULTS).read_bytes(), page.read_text()
    assert trained.count(b"\n") == 4 and "4 of 4 runs" in text
    (tiny / "out" / study.RESULTS).write_bytes(trained[: trained.rfind(b"\n", 0, -1) + 9])  # killed while it wrote
    capsys.readouterr()
    study.main([*flags, "--missing"])
    assert capsys.readouterr().out.startswith("tiny: 1 runs, ")
    study.main([*flags, "--tables-only"])
    assert "tiny, " not in capsys.readouterr().out and "3 of 4 runs" in page.read_text()
    study.main(flags)
    assert capsys.readouterr().out.count("tiny, ") == 1
    again = record.read(tiny / "out" / study.RESULTS)
    assert [run["score"] for run in again.values()] == [json.loads(line)["score"] for line in trained.splitlines()]
    assert page.read_text() == text
