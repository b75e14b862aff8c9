"""The programs of docs/examples for Lightning and Fabric run as they are; stopped and started again, bit for bit."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from pathlib import Path

import pytest
from torchrun import run_bodies, run_program

from recipes import EXAMPLES, need, said_by

pytestmark = [pytest.mark.clusters, pytest.mark.timeout(600)]

BODY = Path(__file__).parent / "on_ranks" / "test_lightning_hooks.py"
SECONDS = 150

# Before a program: a job that dies when all ranks are about to begin epoch STOP.
BEFORE = """
import os
import torch
from hvd_dyncomp import StepFunction

def set_epoch(sampler, epoch, set_epoch=torch.utils.data.DistributedSampler.set_epoch):
    if str(epoch) == os.environ["STOP"]:
        torch.distributed.barrier()
        os._exit(0)
    set_epoch(sampler, epoch)

torch.utils.data.DistributedSampler.set_epoch = set_epoch
"""

# After it: what a rank has, in one write, as the other writes to the same pipe.
AFTER = """
import hashlib
import json
import sys

digest = hashlib.sha256()
for parameter in (model if "model" in globals() else trainer.lightning_module).parameters():
    digest.update(parameter.detach().numpy().tobytes())
total = quantizer.meter.total()
report = {"rank": int(os.environ["RANK"]), "parameters": digest.hexdigest(), "steps": total.steps}
report |= {"levels": [each.bits for each in quantizer.controller.history], "saved": total.saved_fraction}
sys.stdout.write(json.dumps(report) + "\\n")
"""


def program(name: str, *changes: tuple[str, str]) -> str:
    """The program for Lightning or Fabric, with changes."""
    text = (EXAMPLES / f"ddp_{name.lower()}.py").read_text(encoding="utf-8")
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def reports(said: str, ranks: int) -> dict:
    """What rank 0 says; all have the same model and levels."""
    found = [json.loads(line) for line in re.findall(r'\{"rank": .*?\}', said)]
    assert sorted(report["rank"] for report in found) == list(range(ranks))
    for key in ("parameters", "levels"):
        assert all(report[key] == found[0][key] for report in found), f"ranks have different {key}"
    return min(found, key=lambda report: report["rank"])


def trained(text: str, folder: Path, *, ranks: int = 2, stop: int | None = None, warns: bool = False) -> dict:
    """Runs a program in a folder, which may have checkpoints, to its end or until an epoch is to begin."""
    folder.mkdir(exist_ok=True)
    path = folder / "program.py"
    path.write_text("\n".join([BEFORE, text, AFTER]), encoding="utf-8")
    with contextlib.chdir(folder):
        done = run_program(ranks, path, seconds=SECONDS, STOP=str(stop))
    print(done.stdout)
    assert done.returncode == 0
    assert done.stdout.count("one process trains this model") == warns
    return reports(done.stdout, ranks) if stop is None else {}


CHANGES = {
    "Lightning": {
        "levels": ("CompressionCallback(4)", "CompressionCallback(StepFunction((4, 8, 16), (0.4, 0.5)))"),
        "bf16": ("    devices=2,\n", '    devices=2,\n    precision="bf16-mixed",\n'),
    },
    "Fabric": {
        "levels": ("compress(model, 4)", "compress(model, StepFunction((4, 8, 16), (0.4, 0.5)))"),
        "bf16": ("devices=2", 'devices=2, precision="bf16-mixed"'),
    },
}
NAMES = tuple(CHANGES)
VARIANTS = {"4 bits": [], "levels": ["levels"], "bf16": ["levels", "bf16"]}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", NAMES)
def test_a_run_that_died_continues_bit_for_bit(name, variant, tmp_path):
    need("lightning")
    text = program(name, *(CHANGES[name][change] for change in VARIANTS[variant]))
    whole = trained(text, tmp_path / "whole")
    assert trained(text, tmp_path / "died", stop=2) == {}
    assert trained(text, tmp_path / "died") == whole
    assert whole["steps"] == 4 * 2048 / 32 / 2 / 2
    if variant == "4 bits":
        assert set(whole["levels"]) == {4} and whole["saved"] > 0.85
    else:  # the level changes before the end and after it
        assert 4 <= whole["levels"][0] < whole["levels"][1] < whole["levels"][-1] == 16 and whole["saved"] > 0.6


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_a_run_continues_on_another_number_of_ranks(name, ranks, tmp_path):
    need("lightning")
    levels = CHANGES[name]["levels"]
    trained(program(name, levels), tmp_path, stop=2)
    resumed = trained(program(name, levels, ("devices=2", f"devices={ranks}")), tmp_path, ranks=ranks)
    assert len(resumed["levels"]) == 4 and resumed["saved"] > 0.5


@pytest.mark.parametrize("strategy", ["ddp", "auto"])
@pytest.mark.parametrize("name", NAMES)
def test_one_process_trains_without_compression(name, strategy, tmp_path):
    """With "auto", Lightning does not even wrap the model."""
    need("lightning")
    text = program(name, CHANGES[name]["levels"], ("devices=2", "devices=1"), ('"ddp"', f'"{strategy}"'))
    alone = trained(text, tmp_path, ranks=1, warns=strategy == "auto")
    assert alone["saved"] == 0 and len(alone["levels"]) == 4


@pytest.mark.parametrize("name", NAMES)
def test_lightning_starts_the_ranks(name, tmp_path):
    need("lightning")
    (tmp_path / "program.py").write_text(program(name), encoding="utf-8")
    said = said_by([sys.executable, "-P", "program.py"], SECONDS, cwd=tmp_path)
    [saved] = re.findall(r"^(\d+)% of the bytes saved, now at 4 bits$", said, re.MULTILINE)
    assert 84 < int(saved) < 88


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_a_trainer_may_do(ranks):
    need("lightning")
    run_bodies([BODY], ranks, SECONDS)
