"""`python -m hvd_dyncomp probe` on real ranks, and over a link."""

import json
import os
import sys
from pathlib import Path

import pytest

from common.launcher import horovodrun, run
from netlab.hosts import why_not

NETLAB = str(Path(__file__).parents[2] / "launch" / "netlab")
TORCHRUN = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
SHORT = ["--values", "20K", "--levels", "4,0.25", "--seconds", "0.5"]


def probed(command: list[str], output: Path) -> tuple[str, dict]:
    ended = run([*command, "--json", str(output)], timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert ended.returncode == 0, ended.stdout
    return ended.stdout, json.loads(output.read_text())


def test_under_torchrun(tmp_path):
    said, found = probed([*TORCHRUN, "-m", "hvd_dyncomp", "probe", *SHORT], tmp_path / "found.json")
    assert list(found["methods"]) == ["alone", "ddp", "ddp-bf16", "powersgd1", "powersgd4", "4bit-ddp", "0.25bit-ddp"]
    assert all(len(samples["ms"]) >= 2 and min(samples["ms"]) > 0 for samples in found["methods"].values())
    assert "2 ranks on one host, cpu: 20,000 values in 1 tensor\n" in said
    assert "No network interface carries the exchange" in said and found["advice"] in said
    assert said.count("hvd_dyncomp, 0.25 bit") == 1  # on rank 0 only


@pytest.mark.thorough
def test_under_horovodrun(tmp_path):
    program = ["-P", "-m", "hvd_dyncomp", "probe", *SHORT, "--backward-ms", "20"]
    said, found = probed(horovodrun(2, program), tmp_path / "found.json")
    assert list(found["methods"]) == ["alone", "none", "fp16", "4bit", "0.25bit"]
    assert min(found["methods"]["alone"]["ms"]) >= 20  # of backward
    assert "beside 20 ms of backward" in said


@pytest.mark.parametrize(
    ("name", "variables"),
    [
        ("WORLD_SIZE", {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29411"}),
        ("SLURM_STEP_NUM_TASKS", {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}),
    ],
)
def test_ranks_that_nothing_connects_do_not_measure_alone(name, variables):
    """As where a cluster sets the variables itself: Horovod does not know them."""
    program = [sys.executable, "-P", "-m", "hvd_dyncomp", "probe", *SHORT]
    ended = run(program, timeout=120, env={**os.environ, **variables})
    said = f"hvd_dyncomp probe: error: 1 rank is connected, but {name}=2 says that 2 were started: "
    assert ended.returncode == 2 and ended.stdout.startswith(said), ended.stdout
    assert f"unset {name}" in ended.stdout and "ms" not in ended.stdout.split()


def test_a_gpu_that_is_not_there():
    ended = run([*TORCHRUN, "-m", "hvd_dyncomp", "probe", "--device", "cuda"], timeout=120)
    assert ended.returncode != 0
    assert "hvd_dyncomp probe: error: --device cuda: rank 0 has no GPU of its own" in ended.stdout


@pytest.mark.thorough
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "namespaces can be made")
def test_over_a_link(tmp_path):
    """What hosts send is counted; four bits are sent faster than 16 where the link is what all wait for."""
    netlab = [sys.executable, NETLAB, "--launcher", "torchrun", "--rate", "100mbit", "--"]
    program = [sys.executable, "-P", "-m", "hvd_dyncomp", "probe", "--values", "2M", "--levels", "4", "--seconds", "4"]
    said, found = probed([*netlab, *program], tmp_path / "found.json")
    sent = {name: sum(samples["sent"][0]) / 2 / found["values"] for name, samples in found["methods"].items()}
    assert sent["ddp"] == pytest.approx(4, rel=0.1) and sent["4bit-ddp"] == pytest.approx(0.51, rel=0.1)
    assert "2 ranks on 2 hosts" in said and found["advice"].startswith("At 4 bits the exchange adds")
