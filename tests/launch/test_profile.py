"""--profile: a trace of some steps that shows what the exchange does while backward goes on."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity

from runs import DIGITS, assert_refused
from train import profiling
from train.profiling import LEAST, STEPS, Profile

CPU = torch.device("cpu")


def read(folder: Path) -> list[dict]:
    with gzip.open(folder / profiling.FILE) as file:
        return json.load(file)["traceEvents"]


def named(events: list[dict], name: str) -> list[dict]:
    """Ranges of a name, in the order of their beginnings."""
    return sorted((event for event in events if event["name"] == name), key=lambda event: event["ts"])


def within(inner: dict, outer: dict) -> bool:
    """Whether a range lies in another of its thread."""
    ends = [event["ts"] + event["dur"] for event in (inner, outer)]
    return inner["tid"] == outer["tid"] and outer["ts"] <= inner["ts"] and ends[0] <= ends[1]


def test_the_exchange_is_seen_beside_forward_backward_and_update(interrupted: Path) -> None:
    """Of two ranks. That profiling changes nothing of a run, test_train_runs.py sees: it resumes this one."""
    events = read(interrupted)
    loop = [named(events, name) for name in ("forward", "backward", "synchronize", "update")]
    assert [len(ranges) for ranges in loop] == [STEPS] * 4
    for forward, backward, synchronize, update in zip(*loop, strict=True):
        starts = [one["ts"] for one in (forward, backward, synchronize, update)]
        assert starts == sorted(starts)
        # What is ready is encoded by the hooks of backward; what has arrived is decoded, here at the latest.
        assert any(within(encode, backward) for encode in named(events, "hvd_dyncomp.encode"))
        assert any(within(agree, synchronize) for agree in named(events, "hvd_dyncomp.agree"))
    assert len(named(events, "hvd_dyncomp.encode")) == len(named(events, "hvd_dyncomp.decode")) == STEPS
    assert named(events, "hvd_dyncomp.wait")
    assert any(event.get("cat") == "cpu_op" and event["name"] == "aten::convolution" for event in events)


def test_epochs_that_are_too_short_are_one_line(tmp_path: Path) -> None:
    flags = (*DIGITS, "--batch-size", "256", "--epochs", "1", "--output-dir", str(tmp_path / "run"))
    assert_refused((*flags, "--profile"), "--profile", f"at least {LEAST} steps", "they have 2")


@pytest.mark.parametrize(("steps", "seen"), [(LEAST, (3, 4)), (8, (7, 8)), (11, (10, 11)), (500, (10, 11))])
def test_the_first_steps_are_left_out(steps: int, seen: tuple[int, int], tmp_path: Path) -> None:
    profile = Profile(tmp_path, CPU, steps)
    assert f"steps {seen[0]} to {seen[1]} " in profile.where
    profile.begin()
    for step in range(1, steps + 1):
        torch.ones(step).neg()
        profile.step()
    profile.write()
    assert [len(named(read(tmp_path), f"ProfilerStep#{step - 1}")) for step in seen] == [1, 1]
    assert len(named(read(tmp_path), "aten::neg")) == STEPS


def test_a_gpus_streams_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(profiling, "profile", lambda **arguments: asked.append(arguments["activities"]))
    for device in ("cpu", "cuda"):
        Profile(tmp_path, torch.device(device), LEAST)
    assert asked == [[ProfilerActivity.CPU], [ProfilerActivity.CPU, ProfilerActivity.CUDA]]
