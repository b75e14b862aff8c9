"""The declared study: that it can be run, that nothing is run twice, and that what is committed is what came of it."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from common.markdown import filled
from study import __main__ as study
from study import declared, figures, paper_table, record, tuned_tables
from study.declared import PARTS, QUICK
from study.methods import METHODS, RECORDED
from study.parts import BASELINE, TUNING, Largest, Part, Tuned
from study.tasks import RECORDED_TASKS, TASKS, Task

pytestmark = pytest.mark.soak  # research: what it has found is on the pages

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
COMMITTED = DOCS / study.RESULTS


def made_up(part: Part, seeds: int = 2) -> dict[record.Key, dict]:
    """Runs of a part: each method a point worse than the one before, and seed 1 half a point better."""
    numbers = {"loss": 1.0, "bits": 2.0, "values": 1000, "steps": 10, "seconds": 1.0}
    return {
        (task, method, seed): {
            **{"task": task, "contender": method, "seed": seed, "score": 90.0 - place + seed / 2, **numbers},
            "all_bits": 32 / (place + 1),
        }
        for task in part.tasks
        for place, method in enumerate(part.methods)
        for seed in range(seeds)
    }


@pytest.mark.parametrize("part", [*PARTS, *QUICK], ids=lambda part: part.name)
def test_what_is_declared_exists(part: Part) -> None:
    assert set(part.tasks) <= TASKS.keys() | RECORDED_TASKS
    assert set(part.methods) <= METHODS.keys() | RECORDED
    assert {method for _, method, _ in part.wanted({})} <= METHODS.keys()
    assert BASELINE in part.methods
    assert len(set(part.keys)) == len(part.keys)


def test_all_that_exists_is_declared() -> None:
    assert {method for part in PARTS for method in part.methods} == METHODS.keys() | RECORDED
    assert {task for part in PARTS for task in part.tasks} == TASKS.keys() | RECORDED_TASKS


def test_committed_runs_are_declared_and_compact() -> None:
    runs = record.read(COMMITTED)
    assert runs.keys() <= set(declared.keys(PARTS))
    assert len(runs) == COMMITTED.read_text().count("\n")
    fields = {"task", "contender", "seed", "score", "loss", "bits", "all_bits", "values", "steps", "seconds"}
    assert all(run.keys() - {"curve", "residuals"} == fields for run in runs.values())  # which older ones have not
    assert {run.get("residuals", "float32") for run in runs.values()} == {"float32", "bfloat16"}
    assert all(run["curve"][-1] == pytest.approx(run["score"], abs=1e-3) for run in runs.values() if "curve" in run)


def test_committed_tables_are_what_the_committed_runs_give(tmp_path: Path) -> None:
    pages = (study.PAGE, f"tables/{study.PAGE}", paper_table.TABLE)
    for name in (*pages, paper_table.RESULTS):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(DOCS / name, tmp_path / name)
    study.write_pages(tmp_path, study.tables(PARTS, record.read(COMMITTED)))
    for name in pages:
        assert (tmp_path / name).read_text() == (DOCS / name).read_text(), f"python launch/study --tables-only: {name}"
    page, tables = (
        re.findall("<!-- table (.+): written by make study -->", (DOCS / name).read_text()) for name in pages[:2]
    )
    assert sorted([*page, *tables]) == sorted(part.name for part in PARTS) and page and tables


def test_only_what_is_between_the_marks_is_written() -> None:
    part = Part("x", ("mlp",), ("uncompressed", "1"))
    page = "before\n<!-- table x: written by make study -->\nold \\1\n<!-- end of table -->\nafter\n"
    tables = study.tables([part, Part("y", ("mlp",), ("uncompressed",))], made_up(part))
    text = filled(page, tables, "make study")
    assert text.startswith("before\n<!-- table x") and text.endswith("<!-- end of table -->\nafter\n")
    assert "| 1 | 16.00 | -1.00 ± 0.00 (2) |" in text and "old" not in text
    assert filled(text, {"x": tables["x"]}, "make study") == text


def scored(part: Tuned | Largest, score, seeds: list[int] | None = None) -> dict[record.Key, dict]:
    """Runs of a part, of which `score` says what they end at, by (task, method, seed)."""
    numbers = {"loss": 1.0, "bits": 2.0, "all_bits": 2.0, "values": 1000, "steps": 10, "seconds": 1.0}
    return {
        key: {**dict(zip(("task", "contender", "seed"), key, strict=True)), "score": score(*key), **numbers}
        for key in part.keys
        if seeds is None or key[2] in seeds
    }


TUNED = Tuned(
    "x", "mlp", {"uncompressed": ("uncompressed",), "few": ("1/4", "1/4, c = 0.5"), "8": ("8",)}, 4, (("8",),)
)


def by_rate(task: str, method: str, seed: int) -> float:
    """Uncompressed gradients are at their best at the task's rate, others at twice that, half a point worse."""
    best = {"uncompressed": "mlp", "1/4": "mlp, x2", "1/4, c = 0.5": "mlp, x4", "8": "mlp, x2"}[method]
    return 90.0 - (task != best) - 0.5 * (method != "uncompressed") - (method == "1/4") + seed % 2 * 0.1


def test_rates_are_chosen_with_seeds_that_nothing_is_compared_with() -> None:
    assert not set(TUNING) & set(TUNED.seeds_fresh)
    # Rates or momenta only; a rate that is chosen, with seeds that compare.
    shown = (
        *(declared.OTHERS_MLP, declared.LARGE_AT_RATES, declared.BATCH_RATE),
        *(declared.MOMENTUM_LEFT, declared.RECIPE_AT_RATES),
        *(declared.LESS_MOMENTUM, declared.UNCLIPPED, declared.FINER_CODES, declared.WITH_NESTEROV),
        *(declared.NESTEROV_WITH_FORMER_CODES, declared.SHORT_WARM_UPS, declared.TWO_BITS, declared.STOCHASTIC),
        declared.RESNET18,
    )
    assert not {key[2] for key in declared.BATCH_RATE.keys} & set(TUNING)
    compared = [part for part in PARTS if isinstance(part, Part) and part not in shown]
    assert not {key[2] for part in compared for key in part.keys} & {*TUNING, *TUNED.seeds_fresh}
    runs = scored(TUNED, by_rate, list(TUNING))
    assert [TUNED.best(runs, row) for row in TUNED.rows] == [
        *(("mlp", "uncompressed"), ("mlp, x4", "1/4, c = 0.5"), ("mlp, x2", "8"))
    ]
    del runs["mlp, x0.5", "1/4", TUNING[0]]
    assert TUNED.best(runs, "few") is None, "a rate that was not tried may be the best"


def test_a_table_may_choose_among_fewer_rates_with_fewer_seeds() -> None:
    few = replace(TUNED, rates=(0.5, 1), tuning_seeds=TUNING[:1])
    runs = scored(few, by_rate)
    assert {(task, seed) for task, _, seed in runs if seed in TUNING} == {("mlp, x0.5", 100), ("mlp", 100)}
    assert few.best(runs, "8") == ("mlp, x0.5", "8"), "the first of two equal ones: twice the rate was not tried"
    assert "8 of 8 runs that choose rates (seeds 100)" in tuned_tables.tuned(few, runs)


def test_what_decides_is_wanted_first_and_fresh_runs_at_the_best_rate_only() -> None:
    runs: dict = {}
    stages = []
    while lacking := [key for key in TUNED.wanted(runs) if key not in runs]:
        stages.append(lacking)
        runs |= {key: run for key, run in scored(TUNED, by_rate).items() if key in lacking}
    assert [{key[1] for key in stage} for stage in stages] == [
        *({"8"}, {"8"}, {"uncompressed", "1/4", "1/4, c = 0.5"}, {"uncompressed", "1/4, c = 0.5"})
    ]
    assert stages[1] == [("mlp, x2", "8", seed) for seed in (10, 11, 12, 13)]
    assert len(runs) == 4 * 4 * 2 + 3 * 4


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A declared study of two runs a seed, and a folder for what comes of it."""
    task = Task("tiny", "mlp", data="digits", limit=256, half_size=False, epochs=2)
    part = Part("main", ("tiny",), ("uncompressed", "1/4"), seeds=2)
    monkeypatch.setitem(TASKS, "tiny", task)
    monkeypatch.setattr(declared, "PARTS", (part,))
    monkeypatch.setattr(declared, "QUICK", (Part("main", ("tiny",), ("uncompressed", "1/4"), seeds=1),))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_quick_study_from_beginning_to_end(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study.main(["--quick", "--jobs", "1"])
    said = capsys.readouterr().out
    assert "| 0.25 | 0." in said and "2 of 2 runs" in said
    folder = tiny / study.QUICK_DIR
    written = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
    assert written == {study.RESULTS, Path("figures", figures.ONE_RATE)}
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
