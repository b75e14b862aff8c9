"""The example of docs/training.md runs under torchrun as it stands there, and the loops of docs/examples train."""

import re
from pathlib import Path

import pytest
from torchrun import run_program

DOCS = Path(__file__).parents[2] / "docs"
SECONDS = 120


def test_the_example(tmp_path: Path) -> None:
    page = (DOCS / "training.md").read_text(encoding="utf-8")
    [example] = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "train.py").write_text(example, encoding="utf-8")
    done = run_program(2, tmp_path / "train.py")
    assert done.returncode == 0, done.stdout
    [share] = re.findall(r"^(0\.\d+) of the bytes of float32$", done.stdout, re.MULTILINE)
    assert float(share) < 0.2


def trained(program: str, modules: str, *arguments: str) -> tuple[str, float, dict[str, set[str]]]:
    """Trains on two ranks: the line that says what was learned, the share of bytes, and each module's checksums."""
    wrapper, path = Path(__file__).with_name("ends.py"), str(DOCS / "examples" / program)
    done = run_program(2, wrapper, path, modules, *arguments, seconds=SECONDS)
    assert done.returncode == 0, done.stdout
    [(learned, share)] = re.findall(r"^(.*)\n(0\.\d+) of the bytes of float32", done.stdout, re.MULTILINE)
    sums = re.findall(r"^(\w+) is (\w{64})$", done.stdout, re.MULTILINE)
    assert len(sums) == 2 * len(modules.split(",")), done.stdout
    return learned, float(share), {name: {one for each, one in sums if each == name} for name, _ in sums}


def accuracy(learned: str) -> float:
    return float(learned.rpartition("accuracy ")[2])


# A rank that trains alone, on its half of the rows, comes to 0.74.
@pytest.mark.timeout(2 * SECONDS)
def test_a_plain_loop() -> None:
    learned, share, checksums = trained("loop_plain.py", "model", "8")
    assert len(checksums["model"]) == 1
    assert accuracy(learned) > 0.79
    assert 8 / 32 <= share <= 1.1 * 8 / 32


@pytest.mark.timeout(2 * SECONDS)
def test_local_steps() -> None:
    learned, share, checksums = trained("loop_local_steps.py", "shared,model")
    assert len(checksums["shared"]) == 1 and len(checksums["model"]) == 2, "steps are local, their mean is shared"
    assert accuracy(learned) > 0.79
    assert 4 / 32 / 8 <= share <= 1.1 * 4 / 32 / 8


@pytest.mark.timeout(2 * SECONDS)
def test_a_gan() -> None:
    """Real values are about -1 on one rank and about 1 on the other: a generator alone would make its rank's."""
    learned, share, checksums = trained("loop_gan.py", "generator,discriminator")
    assert [len(each) for each in checksums.values()] == [1, 1]
    found = re.match(r"made (\S+) \+- (\S+),", learned)
    assert found and abs(float(found[1])) < 0.5 and 1.1 < float(found[2]) < 1.8
    assert 4 / 32 <= share <= 1.15 * 4 / 32
