"""The example of docs/averager.md runs under torchrun as it stands there."""

import re
from pathlib import Path

from torchrun import run_program

PAGE = Path(__file__).parents[2] / "docs" / "averager.md"


def test_the_example(tmp_path: Path) -> None:
    [example, _] = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    (tmp_path / "train.py").write_text(example, encoding="utf-8")
    done = run_program(2, tmp_path / "train.py")
    assert done.returncode == 0, done.stdout
    [share] = re.findall(r"^(0\.\d+) of the bytes of float32$", done.stdout, re.MULTILINE)
    assert float(share) < 0.2
