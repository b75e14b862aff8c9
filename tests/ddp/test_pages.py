"""The whole programs of docs/quickstart.md, how_it_works.md and dynamic_levels.md run, and do what the pages say."""

import re
from pathlib import Path

import pytest
from torchrun import run_program

DOCS = Path(__file__).parents[2] / "docs"


def printed(name: str, folder: Path, uses: str = "") -> tuple[str, str]:
    """A page, and what two ranks of its program print, or of that program of several which uses something."""
    page = (DOCS / name).read_text(encoding="utf-8")
    programs = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    [program] = [each for each in programs if "init_process_group" in each and uses in each]
    (folder / "train.py").write_text(program, encoding="utf-8")
    done = run_program(2, folder / "train.py")
    assert done.returncode == 0, done.stdout
    return page, done.stdout


def test_the_program_of_the_quickstart(tmp_path: Path) -> None:
    page, said = printed("quickstart.md", tmp_path)
    line = r"epoch (\d): loss (\d\.\d+); (\d+)% of the bytes saved$"
    epochs, shown = (re.findall(rf"^(?:    )?{line}", text, re.MULTILINE) for text in (said, page))
    assert [(epoch, saved) for epoch, _, saved in epochs] == [(epoch, saved) for epoch, _, saved in shown]
    assert len(epochs) == 3 and all(
        abs(float(one[1]) - float(two[1])) < 0.1 for one, two in zip(epochs, shown, strict=True)
    )


@pytest.mark.thorough
def test_error_feedback_on_one_value(tmp_path: Path) -> None:
    page, said = printed("how_it_works.md", tmp_path)
    steps = re.findall(r"^step (\d): sent ([\d.]+), residual ([+-][\d.]+)$", said, re.MULTILINE)
    shown = re.findall(r"^\| (\d) \| 0\.035 \| [\d.]+ \| ([\d.]+) \| ([+-][\d.]+) \|", page, re.MULTILINE)
    assert len(steps) == len(shown) == 6
    assert [(n, float(sent), float(residual)) for n, sent, residual in steps] == [
        (n, float(sent), float(residual)) for n, sent, residual in shown
    ]


@pytest.mark.thorough
def test_a_loop_that_moves_the_level_by_validation_accuracy(tmp_path: Path) -> None:
    page, said = printed("dynamic_levels.md", tmp_path, "StepFunction")
    line = r"^epoch (\d): accuracy (0\.\d+), (\d+) bits, (0\.\d+) of float32's bytes; (.*)$"
    epochs, shown = (re.findall(line, text, re.MULTILINE) for text in (said, page))
    assert [epoch[0] for epoch in epochs] == [epoch[0] for epoch in shown]
    levels = [int(epoch[2]) for epoch in epochs]
    assert levels == sorted(levels) and set(levels) == {4, 8, 16}
    assert {epoch[2:4] for epoch in epochs} == {epoch[2:4] for epoch in shown}  # the bytes of each level
    # The level rises after the epoch whose accuracy has reached a threshold.
    for (_, accuracy, level, _, reason), after in zip(epochs, levels[1:], strict=False):
        reached = 16 if float(accuracy) >= 0.88 else 8 if float(accuracy) >= 0.80 else 4
        assert after == max(int(level), reached), reason
    assert float(epochs[0][3]) < 0.2 and float(epochs[-1][1]) > 0.85


@pytest.mark.thorough
def test_a_loop_that_follows_the_link() -> None:
    done = run_program(2, DOCS / "examples" / "ddp_link_aware.py")
    assert done.returncode == 0, done.stdout
    said = done.stdout
    epochs = re.findall(r"^epoch (\d): waited (\S+?),?:? .*; next: (\d+) bits$", said, re.MULTILINE)
    assert [int(epoch) for epoch, _, _ in epochs] == list(range(6)), said
    assert all(0 <= float(share) <= 1 and int(level) in (4, 8, 16, 32) for _, share, level in epochs)
