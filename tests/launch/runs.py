"""Runs of train_resnet.py on scikit-learn's digits, and what they leave: for the tests of this folder."""

import contextlib
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import torch

import train_resnet
from common.launcher import TRAINER, horovodrun, run

PROGRAM = str(TRAINER)
PLACED = str(Path(__file__).with_name("placed.py"))
DIGITS = ("--dataset", "digits", "--model", "resnet8", "--limit-train", "512")
# Workers on one machine need shared memory only; binding would put all on one core of a small machine.
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "--tag-output"]
TIMEOUT = 240.0  # seconds; on an idle machine a run takes less than 10

# Three epochs at 4 bits, two released, three at 4 bits again.
RELEASE = (*DIGITS, "--epochs", "8", "--policy", "schedule", "--schedule", "0:4,3:32,5:4")
RELEASE_LEVELS = [4, 4, 4, 32, 32, 4, 4, 4]
HOSTS = "aabb"  # of the ranks of a run on hosts of several workers


def mpirun(*flags: str, workers: int = 2, program: tuple[str, ...] = (PROGRAM,)) -> subprocess.CompletedProcess[str]:
    """Runs the program, or another, on some ranks, 3 s sooner than horovodrun, which looks for an MPI first."""
    return run([*MPIRUN, "-np", str(workers), sys.executable, *program, *flags], timeout=TIMEOUT)


def train(*flags: str, workers: int = 2, hosts: str = "") -> str:
    """Returns what was said; ``hosts`` is a letter for each rank, as in placed.py."""
    program = (PLACED, hosts, "--") if hosts else (PROGRAM,)
    ended = mpirun(*flags, workers=len(hosts) or workers, program=program)
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


def train_as_documented(*flags: str, options: tuple[str, ...] = ()) -> str:
    """The same on two workers with horovodrun itself, and options of its own."""
    ended = run(horovodrun(2, [PROGRAM, *flags], *options), timeout=TIMEOUT)
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


TAG = r"\[(?:1,)?\d+\]<std(?:out|err)>:"  # which horovodrun puts before the lines of a rank, over MPI or Gloo
EPOCH = re.compile(
    r"epoch +(\d+)/\d+ +[\d.]+ bits  loss [\d.]+  accuracy train [\d.]+% val [\d.]+% test [\d.]+%  sent .+ "
    r"\(\d+% (?:saved|more than float32)\)  [\d.]+ s \(compute [\d.]+, exchange [\d.]+\)(?: -> [\d.]+ bits \(.+\))?"
)


def assert_reads_well(said: str, epochs: int) -> None:
    """Every line of a job's output has one tag, at its beginning, and there is one line for each epoch, in order."""
    lines = said.splitlines()
    assert [line for line in lines if len(re.findall(TAG, line)) != 1 or not re.match(TAG, line)] == []
    texts = [re.sub(TAG, "", line) for line in lines]
    found = [EPOCH.fullmatch(text) for text in texts if text.startswith("epoch")]
    assert [match and int(match[1]) for match in found] == list(range(1, epochs + 1)), texts


def main(*flags: str) -> tuple[object, list[str]]:
    """Run the program on one rank, in this process; returns its status and what it says on stderr."""
    said = io.StringIO()
    before = sys.argv
    sys.argv = [PROGRAM, *flags]
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
            train_resnet.main()
        return 0, said.getvalue().splitlines()
    except SystemExit as ended:
        return ended.code, said.getvalue().splitlines()
    finally:
        sys.argv = before


def assert_refused(flags: tuple[str, ...], *named: str) -> None:
    status, lines = main(*flags)
    assert status == 2 and len(lines) == 1, lines
    assert lines[0].startswith("train_resnet.py: error: ")
    assert all(part in lines[0] for part in named), lines[0]


def metrics(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith("seconds")} for line in lines]


def checkpoint(folder: Path) -> dict:
    return torch.load(folder / "checkpoint.pt", weights_only=True)


def same(a: object, b: object) -> bool:
    """Equality of nested plain data with tensors in it, bit for bit; seconds are left out."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.dtype == torch.uint8:  # a rank's state, as `AllRanks` packs it
            return same(*(torch.load(io.BytesIO(one.numpy().tobytes()), weights_only=True) for one in (a, b)))
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all("seconds" in str(key) or same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def assert_same_runs(a: Path, b: Path) -> None:
    assert metrics(a) == metrics(b)
    assert same(checkpoint(a), checkpoint(b))
