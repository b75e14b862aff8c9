"""The declared study: that it can be run, that nothing is run twice, and that what is committed is what came of it."""

import json
from pathlib import Path

import pytest
from matplotlib.image import imread

from screening import results
from screening.contenders import CONTENDERS
from screening.tasks import TASKS, Task
from studies import declared, matrix, pareto, program, study
from studies.declared import PARTS, QUICK, Part

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / "docs" / "study" / study.RESULTS
PAGES = (ROOT / "docs" / "study.md", ROOT / "README.md")


def made_up(part: Part, seeds: int = 2) -> dict[results.Key, dict]:
    """Runs of a part: each contender a point worse than the one before, and seed 1 half a point better."""
    numbers = {"loss": 1.0, "bits": 2.0, "values": 1000, "steps": 10, "seconds": 1.0}
    return {
        (task, contender, seed): {
            **{"task": task, "contender": contender, "seed": seed, "score": 90.0 - place + seed / 2, **numbers},
            "all_bits": 32 / (place + 1),
        }
        for task in part.tasks
        for place, contender in enumerate(part.contenders)
        for seed in range(seeds)
    }


def write(path: Path, runs: dict[results.Key, dict]) -> None:
    path.write_text("".join(json.dumps(run) + "\n" for run in runs.values()))


@pytest.mark.parametrize("part", [*PARTS, *QUICK], ids=lambda part: part.name)
def test_what_is_declared_exists(part: Part) -> None:
    assert set(part.tasks) <= TASKS.keys()
    assert set(part.contenders) <= CONTENDERS.keys()
    assert matrix.BASELINE in part.contenders
    assert len(set(part.keys)) == len(part.keys)


def test_all_that_exists_is_declared() -> None:
    assert {contender for part in PARTS for contender in part.contenders} == CONTENDERS.keys()
    assert {task for part in PARTS for task in part.tasks} == TASKS.keys()


def test_what_is_shown_of_the_study_needs_no_runs_of_its_own() -> None:
    assert set(declared.README.keys) <= set(declared.keys(part for part in PARTS if part != declared.README))
    assert {key for part in QUICK for key in part.keys} <= set(declared.MAIN.keys)


def test_committed_runs_are_declared_and_compact() -> None:
    runs = results.read(COMMITTED)
    assert runs.keys() <= set(declared.keys(PARTS))
    assert len(runs) == COMMITTED.read_text().count("\n")
    fields = {"task", "contender", "seed", "score", "loss", "bits", "all_bits", "values", "steps", "seconds"}
    assert all(run.keys() == fields for run in runs.values())


def test_committed_tables_are_what_the_committed_runs_give() -> None:
    runs = results.read(COMMITTED)
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert matrix.filled(text, PARTS, runs) == text
    shown = [runs[key] for key in declared.keys(PARTS) if key in runs]
    assert COMMITTED.with_name(study.DETAILS).read_text() == study.details(shown)


def test_every_table_stands_in_the_page_once() -> None:
    text = PAGES[0].read_text()
    assert {part.name: text.count(f"<!-- table {part.name}: ") for part in PARTS} == dict.fromkeys(
        (part.name for part in PARTS), 1
    )


def test_a_table_has_differences_errors_and_seeds() -> None:
    part = Part("x", ("mlp", "resnet8"), ("uncompressed", "1", "4", "2"))
    runs = made_up(part)
    runs = {key: run for key, run in runs.items() if key[1] != "4" and key != ("resnet8", "1", 1)}
    runs["mlp", "1", 1]["score"] += 1
    head, _, *rows, _, note = matrix.table(part, runs).splitlines()
    assert head == "| contender | bits | mlp | resnet8 |"
    assert rows == [
        "| uncompressed | 32.00 | 90.25 ± 0.25 (2) | 90.25 ± 0.25 (2) |",
        "| 1 | 16.00 | -0.50 ± 0.50 (2) | -1.00 (1) |",
        "| 2 | 8.00 | -3.00 ± 0.00 (2) | -3.00 ± 0.00 (2) |",
    ]
    assert note.startswith("11 of 24 runs: 3 of each")


def test_of_some_contenders_one_run_is_enough() -> None:
    part = Part("x", ("mlp",), ("uncompressed", "1", "2"), once=("2",))
    assert [key[2] for key in part.keys] == [0, 1, 2, 0, 1, 2, 0]
    head, _, *rows, _, note = matrix.table(part, made_up(part, seeds=3)).splitlines()
    assert rows[-1].endswith("| -2.00 (1) |") and note.startswith("7 of 7 runs")


def test_only_what_is_between_the_marks_is_written() -> None:
    part = Part("x", ("mlp",), ("uncompressed", "1"))
    page = "before\n<!-- table x: written by make study -->\nold \\1\n<!-- end of table -->\nafter\n"
    filled = matrix.filled(page, [part, Part("y", ("mlp",), ("uncompressed",))], made_up(part))
    assert filled.startswith("before\n<!-- table x") and filled.endswith("<!-- end of table -->\nafter\n")
    assert "| 1 | 16.00 | -1.00 ± 0.00 (2) |" in filled and "old" not in filled
    assert matrix.filled(filled, [part], made_up(part)) == filled


def test_the_time_of_a_step_is_what_is_computed_and_what_the_link_takes() -> None:
    part = Part("x", ("mlp", "resnet8, 8 workers"), ("uncompressed", "1"))
    runs = made_up(part)
    runs["mlp", "uncompressed", 1]["seconds"] = 0.5
    assert pareto.computed(part, runs, "mlp") == pytest.approx(0.5 / 10 / 2)
    assert pareto.computed(part, runs, "resnet8, 8 workers") == pytest.approx(1 / 10 / 8)
    # 1000 values of 16 bits, of which a packet's 1448 of 1514 bytes are payload.
    seconds = pareto.seconds_of_a_step(runs["mlp", "1", 0], 0.25)
    assert seconds == pytest.approx(0.25 + 16000 / 100e6 * 1514 / 1448)


def test_figures_have_a_panel_for_each_task_with_something_to_compare(tmp_path: Path) -> None:
    alone = made_up(Part("x", declared.MAIN.tasks, ("uncompressed",)))  # nothing to compare with
    sizes = []
    for tasks in (("mlp",), ("mlp", "resnet8, short", "text, sgd, short")):
        pareto.write(tmp_path, declared.MAIN, made_up(Part("x", tasks, declared.MAIN.contenders)) | alone)
        sizes.append([imread(tmp_path / name).shape[:2] for name in pareto.FIGURES])
    for (narrow, low), (wide, high) in zip(*[[(size[1], size[0]) for size in own] for own in sizes], strict=True):
        assert wide > 2 * narrow
        assert high <= low


def test_every_contender_of_the_main_table_has_a_style() -> None:
    assert set(declared.MAIN.contenders) <= pareto._STYLES.keys()


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
    program.main(["--quick", "--jobs", "1"])
    said = capsys.readouterr().out
    assert "| 1/4 | 0." in said and "2 of 2 runs" in said
    folder = tiny / study.QUICK_DIR
    assert {path.name for path in folder.iterdir()} == {study.RESULTS, study.DETAILS, *pareto.FIGURES}
    runs = results.read(folder / study.RESULTS)
    assert len(runs) == 2
    assert not any("curve" in run for run in runs.values())
    assert list(tiny.iterdir()) == [tiny / "runs"]


def test_what_is_there_is_not_trained_again(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tiny / "page.md"
    page.write_text("<!-- table main: written by make study -->\n<!-- end of table -->\n")
    flags = ["--jobs", "1", "--output-dir", str(tiny / "out"), "--pages", str(page)]
    program.main(flags)
    trained, text = (tiny / "out" / study.RESULTS).read_bytes(), page.read_text()
    assert trained.count(b"\n") == 4 and "4 of 4 runs" in text
    (tiny / "out" / study.RESULTS).write_bytes(trained[: trained.rfind(b"\n", 0, -1) + 9])  # killed while it wrote
    capsys.readouterr()
    program.main([*flags, "--missing"])
    assert capsys.readouterr().out.startswith("tiny: 1 runs, ")
    program.main(flags)
    assert capsys.readouterr().out.count("tiny, ") == 1
    again = results.read(tiny / "out" / study.RESULTS)
    assert [run["score"] for run in again.values()] == [json.loads(line)["score"] for line in trained.splitlines()]
    assert page.read_text() == text


def test_tables_only_trains_nothing(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tiny / "out"
    out.mkdir()
    write(out / study.RESULTS, {key: run for key, run in made_up(declared.PARTS[0], 1).items()})
    before = (out / study.RESULTS).read_bytes()
    program.main(["--tables-only", "--output-dir", str(out), "--pages"])
    assert (out / study.RESULTS).read_bytes() == before
    assert "| tiny | 1/4 | 1 | 89.00 | -1.00 |" in (out / study.DETAILS).read_text()


@pytest.mark.parametrize("flags", ["--tables-only", "--parts nothing", "--paper --seeds x"])
def test_what_cannot_be_done_is_one_line(flags: str, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        program.main(flags.split())
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
