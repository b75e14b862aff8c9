"""The study's table, made from small files that look like finished runs."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.errors import RunError
from study import __main__ as program
from study import paper, paper_table
from study.scenarios import SCENARIOS, Result, Scenario, Study
from train import options
from train.metrics import METRICS, SUMMARY, summary_of

EPOCHS = 6
LEVELS = {"none": [32] * 6, "static8": [8] * 6, "static4": [4] * 6}
LEVELS |= {"dynamic4-8-16": [4, 8, 32, 32, 16, 16], "dynamic1-2-4": [1, 2, 2, 4, 4, 4]}
LEVELS["dynamic16-8-4"] = [16, 16, 8, 8, 4, 4]
THRESHOLDS = "0.4,0.6"


def line(scenario: Scenario, epoch: int, seed: int) -> dict:
    level = LEVELS[scenario.name][epoch]
    accuracy = 0.3 + 0.1 * epoch + 0.01 * seed
    bytes_sent = 1e6 * level / 32
    return {
        "epoch": epoch, "level": level, "next_level": level, "reason": "made up",
        "train_loss": 2.0 - 0.3 * epoch, "val_loss": 2.0, "test_loss": 2.0,
        "train_accuracy": accuracy, "val_accuracy": accuracy, "test_accuracy": accuracy - 0.02,
        "bytes_sent": bytes_sent, "bytes_float32": 1e6, "hosts": 1,
        "saved_fraction": 1 - level / 32, "seconds": 30.0, "seconds_compute": 20.0, "seconds_exchange": 5.0, "lr": 0.1,
    }  # fmt: skip


def pretend(folder: Study, scenario: Scenario, seed: int) -> None:
    """Leave the files of a finished run."""
    place = folder.folder(scenario, seed)
    place.mkdir(parents=True)
    lines = [line(scenario, epoch, seed) for epoch in range(EPOCHS)]
    (place / METRICS).write_text("".join(json.dumps(item) + "\n" for item in lines))
    config = options.config(options.parse(folder.arguments(scenario, seed, THRESHOLDS)))
    (place / SUMMARY).write_text(json.dumps(summary_of({**config, "world_size": 2}, lines)))


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Study]:
    args = program.parse(["paper", "--dataset", "digits", "--epochs", str(EPOCHS)])
    yield Study(tmp_path / "runs", paper.shared_flags(args))


def finished(runs: Study, seeds: tuple[int, ...]) -> list[Result]:
    results = []
    for scenario in SCENARIOS:
        for seed in seeds:
            pretend(runs, scenario, seed)
            result = runs.result(scenario, seed, THRESHOLDS)
            assert result is not None
            results.append(result)
    return results


def test_table_only_study_end_to_end(runs: Study, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finished(runs, (0, 1))
    flags = ["--dataset", "digits", "--epochs", str(EPOCHS), "--thresholds", THRESHOLDS, "--tables-only"]
    program.main(["paper", *flags, "--runs-dir", str(runs.runs_dir), "--output-dir", str(tmp_path / "out")])
    text = (tmp_path / "out" / paper_table.TABLE).read_text()
    assert " ".join(flags) in text
    main_table = text.split("\n\n")[2].splitlines()
    rows = {row.split("|")[1].strip(): row for row in main_table[2:]}
    assert list(rows) == [scenario.title for scenario in SCENARIOS]
    # Ours: 0.3 + 0.5 - 0.02, and a point more with the second seed; then the paper's.
    assert "| 78.50 ± 0.50 | 92.96 | 3.0 ± 0.0 | 65.12 | 6 ± 0 | 2.31 | 100.0 ± 0.0 | 100 |" in rows["uncompressed"]
    assert "| 85.97 |" in rows["static 8"] and "| 25.0 ± 0.0 | 79 |" in rows["static 8"]
    assert "| 91.40 |" in rows["dynamic 4-8-16"]
    assert "—" in rows["static 4"]
    assert "4 8 32 32 16 16" in text
    numbers = json.loads((tmp_path / "out" / paper_table.RESULTS).read_text())
    assert len(numbers["runs"]) == 2 * len(SCENARIOS) and len(numbers["runs"][0]["epochs"]) == EPOCHS
    assert "wrote" in capsys.readouterr().out


def test_runs_of_other_arguments_are_not_taken(runs: Study) -> None:
    pretend(runs, SCENARIOS[0], 0)
    longer = Study(runs.runs_dir, (*runs.flags, "--epochs", "7"))
    with pytest.raises(RunError, match=r"epochs 6 \(now 7\)"):
        longer.result(SCENARIOS[0], 0, THRESHOLDS)
