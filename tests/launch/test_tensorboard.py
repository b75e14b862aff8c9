"""--tensorboard: every epoch as scalars, and one line where TensorBoard is missing."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from runs import DIGITS, assert_refused, main
from train.tensorboard import scalars

FLAGS = (*DIGITS, "--epochs", "3", "--levels", "2,4", "--thresholds", "0.3")

with_tensorboard = pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed"
)


def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """{name: [(step, value)]} of all that TensorBoard shows of a run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {name: [(one.step, one.value) for one in events.Scalars(name)] for name in events.Tags()["scalars"]}


def expected(folder: Path) -> dict[str, list[tuple[int, float]]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found: dict[str, list[tuple[int, float]]] = {}
    for line in lines:
        for name, value in scalars(line).items():
            found.setdefault(name, []).append((line["epoch"] + 1, pytest.approx(value, rel=1e-6)))
    return found


def test_the_scalars_of_a_line() -> None:
    line = {"epoch": 4, "level": 2, "tensor_levels": {"fc.weight": 3}, "train_loss": None, "val_loss": 1.5}
    line |= {"tensor_errors": {"fc.weight": 0.25}}
    line |= {"test_loss": 1.25, "train_accuracy": 0.75, "val_accuracy": 0.5, "test_accuracy": 0.25}
    line |= {"bytes_sent": 3.0, "bytes_float32": 24.0, "bytes_leaving_host": 0.0, "bytes_float32_leaving_host": 0.0}
    line |= {"bytes_staying_on_host": 6.0, "seconds": 7.0, "seconds_compute": 4.0, "seconds_exchange": 2.0}
    found = scalars(line)
    assert found == {
        **{"level/level": 2, "level/bits_a_value": 4, "loss/val": 1.5, "loss/test": 1.25},
        "tensor_errors/fc.weight": 0.25,
        **{"accuracy/train": 0.75, "accuracy/val": 0.5, "accuracy/test": 0.25},
        **{"bytes/sent": 3, "bytes/float32": 24, "bytes/leaving_host": 0, "bytes/staying_on_host": 6},
        **{"seconds/epoch": 7, "seconds/compute": 4, "seconds/exchange": 2},
    }
    hosts = line | {"bytes_leaving_host": 1.0, "bytes_float32_leaving_host": 16.0}
    assert scalars(hosts)["level/bits_a_value"] == 2
    assert "level/bits_a_value" not in scalars(line | {"bytes_float32": 0.0})


@with_tensorboard
def test_every_epoch_is_there_once_also_after_a_crash_and_those_before_the_flag(tmp_path: Path) -> None:
    flags = (*FLAGS, "--output-dir", str(tmp_path))
    assert main(*flags, "--stop-after", "1") == (0, [])
    assert not (tmp_path / "tensorboard").exists()
    assert main(*flags, "--resume", "--tensorboard", "--stop-after", "2") == (0, [])
    # As if it had been killed in its second epoch: that is trained, and written, once more.
    for path in tmp_path.glob("checkpoints/epoch-0002*"):
        path.unlink()
    assert main(*flags, "--resume", "--tensorboard") == (0, [])
    assert read(tmp_path) == expected(tmp_path)
    assert [step for step, _ in read(tmp_path)["accuracy/test"]] == [1, 2, 3]


def test_without_tensorboard_one_line_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    flags = (*DIGITS, "--epochs", "1", "--output-dir", str(tmp_path / "run"))
    assert_refused((*flags, "--tensorboard"), "--tensorboard", "pip install tensorboard")
    assert not (tmp_path / "run").exists()
    assert main(*flags) == (0, [])
