"""The programs of docs/examples for DDP in torch, Trainer and Accelerate run as they are, and resume bit for bit."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from recipes import EXAMPLES, need, said_by

pytestmark = [pytest.mark.clusters, pytest.mark.timeout(400)]

TRAINER, ACCELERATE, TORCH = PROGRAMS = ("ddp_trainer.py", "ddp_accelerate.py", "ddp_torch.py")
NEEDED = {TRAINER: ["transformers", "accelerate"], ACCELERATE: ["accelerate"], TORCH: []}


def at(program: str, levels: str) -> tuple[str, str]:
    """What takes the place of what in a program."""
    model = "trainer" if program == TRAINER else "model"
    return f"({model}, 4)", f"({model}, {levels})"


CLIMBS = {  # through levels of which the second comes before the run is stopped, the third after it
    TRAINER: at(TRAINER, 'hvd_dyncomp.StepFunction(thresholds=(0.9, 0.94), monitor="eval_accuracy", loss="eval_loss")'),
    ACCELERATE: at(ACCELERATE, "hvd_dyncomp.StepFunction(thresholds=(0.6, 0.8), cooldown=1)"),
    TORCH: at(TORCH, "hvd_dyncomp.StepFunction(thresholds=(0.6, 0.8), cooldown=1)"),
}
BF16 = {
    TRAINER: ("bf16=False", "bf16=True"),
    ACCELERATE: ('mixed_precision="no"', 'mixed_precision="bf16"'),
    TORCH: ("enabled=False", "enabled=True"),
}
STOP = (".epoch, 4)", ".epoch, 2)")

# Before and after a program: what it has trained, by epoch.
BEFORE = """
import hashlib
import json
import os

import hvd_dyncomp

def digest(parameters):
    return hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in parameters)).hexdigest()[:16]

def step(controller, *arguments, **named):
    bits = controller_step(controller, *arguments, **named)
    sessions = [session for each in hvd_dyncomp.momentum._sessions if (session := each()) is not None]
    epochs[controller.epoch - 1] = digest(each for session in sessions for _, each in session.trained())
    return bits

controller_step, hvd_dyncomp.Controller.step, epochs = hvd_dyncomp.Controller.step, step, {}
"""
AFTER = """
quantizer = globals().get("quantizer") or compression.quantizer
total, history = quantizer.meter.total(), quantizer.controller.history
print("REPORT" + json.dumps({
    "rank": int(os.environ.get("RANK", 0)),
    "epochs": epochs,
    "levels": [record.bits for record in history],
    "metrics": [record.metrics for record in history],
    "sent": total.sent_bytes / max(total.float32_bytes, 1),
    "steps": quantizer.state_dict()["steps"],
}) + "END", flush=True)
"""


def runs(program: str, folder: Path, *changes: tuple[str, str], ranks: int = 2) -> tuple[dict, str]:
    """Runs a program; what rank 0 reports, with whom all others agree, and all that was said.

    Args:
        changes: what takes the place of what in the program.
        ranks: 0 starts it without torchrun.
    """
    need(*NEEDED[program])
    text = (EXAMPLES / program).read_text(encoding="utf-8")
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / "train.py").write_text(BEFORE + text + AFTER, encoding="utf-8")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    said = said_by([sys.executable, *launcher, "train.py"], 150, cwd=folder)
    reports = [json.loads(line) for line in re.findall(r"REPORT(\{.*?\})END", said)]
    assert sorted(report.pop("rank") for report in reports) == list(range(max(ranks, 1)))
    for report in reports:
        assert {**report, "sent": 0} == {**reports[0], "sent": 0}
    return reports[0], said


def stopped(program: str, folder: Path, *changes: tuple[str, str]) -> None:
    """Leaves what a run that was stopped after two of four epochs leaves."""
    if program != TRAINER:  # whose schedule depends on the number of epochs
        report, _ = runs(program, folder, *changes, STOP)
        assert len(report["epochs"]) == 2
        return
    if not (folder / "run").exists():
        runs(program, folder, *changes)
    for checkpoint in sorted((folder / "run").iterdir(), key=lambda path: int(path.name.split("-")[1]))[2:]:
        shutil.rmtree(checkpoint)


@pytest.mark.parametrize("program", PROGRAMS)
def test_as_it_stands(program, tmp_path):
    report, _ = runs(program, tmp_path)
    assert len(report["epochs"]) == 4 and report["steps"] == 4 * 512 / (2 * 16 * 2)
    assert 0.12 < report["sent"] < 0.6 and report["levels"] == sorted(report["levels"])
    assert max(next(v for k, v in each.items() if "accuracy" in k) for each in report["metrics"]) > 0.75
    assert all("train_loss" in each and not any("second" in name for name in each) for each in report["metrics"])


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("how", ["4 bits", "climbs", "bf16"])
def test_a_resumed_run_is_the_uninterrupted_one(program, how, tmp_path):
    changes = [*([CLIMBS[program]] if how != "4 bits" else []), *([BF16[program]] if how == "bf16" else [])]
    whole, _ = runs(program, tmp_path, *changes)
    if how == "4 bits":
        assert 0.12 < whole["sent"] < 0.2 and set(whole["levels"]) == {4}
    elif how == "climbs":
        assert whole["levels"][1] < whole["levels"][3] and whole["levels"][1] > 4
    if program != TRAINER:
        tmp_path = tmp_path / "again"
        tmp_path.mkdir()
    stopped(program, tmp_path, *changes)
    rest, said = runs(program, tmp_path, *changes)
    assert list(rest["epochs"]) == ["2", "3"] and "start empty" not in said
    assert rest["epochs"] == {epoch: whole["epochs"][epoch] for epoch in ("2", "3")}
    assert (rest["levels"], rest["metrics"], rest["steps"]) == (whole["levels"], whole["metrics"], whole["steps"])


@pytest.mark.parametrize("program", PROGRAMS)
def test_another_number_of_ranks_goes_on(program, tmp_path):
    changes = CLIMBS[program]
    stopped(program, tmp_path, changes)
    shutil.copytree(tmp_path, tmp_path / "one")
    for folder, ranks in ((tmp_path, 3), (tmp_path / "one", 1)):
        report, said = runs(program, folder, changes, ranks=ranks)
        assert len(report["levels"]) >= 4 and report["levels"][1] > 4  # Trainer counts epochs anew, by steps
        assert "start empty" not in said and "dropped" not in said


@pytest.mark.parametrize("program", PROGRAMS)
def test_momentum_is_left_out_where_the_program_says_so(program, tmp_path):
    said, found = [], set()
    for number, instead in enumerate(["# hvd_dyncomp.less_momentum", "hvd_dyncomp.less_momentum"]):
        folder = tmp_path / str(number)
        folder.mkdir()
        report, words = runs(program, folder, at(program, "0.25"), ("# hvd_dyncomp.less_momentum", instead))
        said.append("delivered late" in words)
        found.add(report["epochs"]["3"])
    assert said == [True, False] and len(found) == 2


class TestTrainer:
    """What only Trainer can do."""

    def test_a_checkpoint_without_the_file_is_resumed(self, tmp_path):
        stopped(TRAINER, tmp_path)
        for path in (tmp_path / "run").glob("*/quantizer.pt"):
            path.unlink()
        report, said = runs(TRAINER, tmp_path)
        assert len(report["epochs"]) == 2 == len(report["levels"]) and said.count("start empty") == 1

    def test_a_checkpoint_from_elsewhere(self, tmp_path):
        whole, _ = runs(TRAINER, tmp_path)
        stopped(TRAINER, tmp_path)
        [_, newest] = sorted((tmp_path / "run").iterdir(), key=lambda path: int(path.name.split("-")[1]))
        newest.rename(tmp_path / "elsewhere")
        shutil.rmtree(tmp_path / "run")
        here = ('get_last_checkpoint("run") if os.path.isdir("run") else None', '"elsewhere"')
        report, said = runs(TRAINER, tmp_path, here)
        assert said.count("start empty") == 1 and len(report["levels"]) == 2
        report, said = runs(TRAINER, tmp_path, here, ('"run",', '"run", resume_from_checkpoint="elsewhere",'))
        assert "start empty" not in said and report["epochs"]["3"] == whole["epochs"]["3"]
