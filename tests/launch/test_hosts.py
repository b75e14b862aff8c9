"""train_resnet.py on several hosts, for which this one machine passes: what is counted and said, and going on."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from runs import HOSTS, RELEASE, RELEASE_LEVELS, assert_same_checkpoints, metrics, train
from train.carried import Carried
from train.models import build_model

pytestmark = pytest.mark.promise(
    "A restarted run equals the uninterrupted run bit for bit.", "A run may continue with workers on other hosts."
)


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def test_what_leaves_a_host_is_what_the_level_says(whole: Path, whole_of_hosts: Path) -> None:
    lines = metrics(whole_of_hosts)
    assert [line["level"] for line in lines] == RELEASE_LEVELS
    # As much as where every worker has a link of its own.
    for line, alone in zip(lines, metrics(whole), strict=True):
        assert line["hosts"] == 2
        assert line["saved_fraction"] == pytest.approx(alone["saved_fraction"], abs=0.003)
        leaving, staying = line["bytes_leaving_host"], line["bytes_staying_on_host"]
        assert leaving + staying == pytest.approx(2 * line["bytes_sent"], abs=1)
        assert staying > 2 * leaving or line["level"] == 32
    assert summary(whole_of_hosts)["bytes_leaving_host"] == sum(line["bytes_leaving_host"] for line in lines)


@pytest.mark.parametrize("run", ["whole", "whole_of_hosts"])
def test_errors_by_tensor_are_of_the_level(run: str, request: pytest.FixtureRequest) -> None:
    """Of all large tensors, whichever worker of a host knows them, in the model's order."""
    model = build_model("resnet8", in_channels=1, num_classes=10, shortcut="A", seed=0)
    large = [name for name, parameter in model.named_parameters() if parameter.numel() >= 1024]
    for line in metrics(request.getfixturevalue(run)):
        errors = line["tensor_errors"]
        assert [name for name in errors if name in large] == large and len(errors) == len(large) + 1
        low, high = {4: (0.01, 0.5), 32: (0, 0)}[line["level"]]
        assert all(low <= errors[name] <= high for name in large)


def interrupted(whole: Path, folder: Path) -> Path:
    """The same run with seven of its eight epochs."""
    shutil.copytree(whole, folder)
    (folder / "checkpoints" / "epoch-0008.pt").unlink()
    return folder


def test_resume_equals_no_interruption(whole_of_hosts: Path, tmp_path: Path) -> None:
    folder = interrupted(whole_of_hosts, tmp_path / "run")
    assert "resumed after 7 of 8 epochs" in train(*RELEASE, "--output-dir", str(folder), "--resume", hosts=HOSTS)
    assert metrics(folder) == metrics(whole_of_hosts)
    assert_same_checkpoints(folder, whole_of_hosts)
    own = torch.load(folder / "checkpoints" / "epoch-0008.rank3.pt", weights_only=True)
    assert own["quantizer"]["hosts"] == [[0, 1], [2, 3]]


def test_a_run_goes_on_where_its_workers_are_on_other_hosts(whole_of_hosts: Path, tmp_path: Path) -> None:
    folder = interrupted(whole_of_hosts, tmp_path / "run")
    said = train(*RELEASE, "--output-dir", str(folder), "--resume", hosts="aaab")
    assert "resumed after 7 of 8 epochs" in said
    assert said.count("hosts have different numbers of workers (3, 1)") == 1
    before, after = metrics(whole_of_hosts)[-1], metrics(folder)[-1]
    assert after["train_loss"] == pytest.approx(before["train_loss"], rel=0.1)
    assert after["saved_fraction"] < before["saved_fraction"]


@pytest.mark.parametrize(
    ("leaving", "staying", "said"),
    [
        (0, 4e6, "sent 2.0 MB per worker within the host (so much)"),
        (4e6, 0, "sent 4.0 MB from each host (so much)"),
        (1e6, 3e6, "sent 1.0 MB from each host (so much), and 3.0 MB within it"),
    ],
)
def test_words_say_which_bytes_they_mean(leaving: float, staying: float, said: str) -> None:
    record = {"bytes_sent": (leaving + staying) / 2, "bytes_float32": 1e9, "bytes_leaving_host": leaving}
    record |= {"bytes_staying_on_host": staying, "bytes_float32_leaving_host": 1e9 if leaving else 0.0}
    assert Carried.of(record).in_words(" (so much)") == said
