"""The script and the recipe for checkpoints of docs/fsdp.md run as they stand there."""

import re
from pathlib import Path

import pytest
from torchrun import run_program

pytestmark = pytest.mark.promise("A restarted run equals the uninterrupted run bit for bit.")

PAGE = Path(__file__).parents[2] / "docs" / "fsdp.md"
PROGRAM = Path(__file__).with_name("continues.py")
SECONDS = 120


def test_hsdp_is_compressed_by_two_lines():
    """What the page says to change is what its script has."""
    [diff] = re.findall(r"^```diff\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    added = [line[1:] for line in diff.splitlines() if line.startswith("+")]
    script = code("fsdp.attach")
    assert (
        added[0] in script and '{"replicate": "hvd_dyncomp"}' in added[1] and '{"replicate": "hvd_dyncomp"}' in script
    )


def code(text: str) -> str:
    """The page's only Python code with this text in it."""
    fences = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    [found] = [each for each in fences if text in each]
    return found


@pytest.mark.timeout(SECONDS + 20)
def test_the_script(tmp_path):
    (tmp_path / "train.py").write_text(code("fsdp.attach"), encoding="utf-8")
    done = run_program(4, tmp_path / "train.py", seconds=SECONDS)
    assert done.returncode == 0, done.stdout
    [(loss, share)] = re.findall(r"^loss (\d\.\d+), (0\.\d+) of the bytes of float32$", done.stdout, re.MULTILINE)
    most = (1 + 59 * 1.1 * (4 + 16 / 128) / 32) / 60  # the first step is uncompressed
    assert float(loss) < 1 and 4 / 32 < float(share) < most  # of ten classes; it begins at 2.3


def said(ranks: int, *arguments: object) -> tuple[list[str], list[str]]:
    """Of each rank: the whole parameters where it begins to train on, and its parameters and residuals at the end."""
    done = run_program(ranks, PROGRAM, *map(str, arguments), seconds=SECONDS)
    assert done.returncode == 0, done.stdout
    found = sorted(re.findall(r"rank (\d) (from|to) (\w{64})", done.stdout))
    assert len(found) == 2 * ranks, done.stdout
    return [one for _, when, one in found if when == "from"], [one for _, when, one in found if when == "to"]


@pytest.mark.thorough
@pytest.mark.timeout(3 * SECONDS + 20)
def test_the_recipe_for_checkpoints(tmp_path):
    """At 1 bit, where residuals matter: a new job ends with the same bits. Other numbers of ranks begin from there."""
    recipe, folder = tmp_path / "recipe.py", tmp_path / "saved"
    recipe.write_text(code("def load"), encoding="utf-8")
    saved_at, expected = said(4, "save", folder, recipe)
    assert len(set(saved_at)) == 1 and len(set(expected)) == 4
    assert said(4, "load", folder, recipe) == (saved_at, expected)
    begins, ends = said(2, "load", folder, recipe, 4)
    assert begins == saved_at[:2] and len(set(ends)) == 2
