"""`python -m hvd_dyncomp run` under torchrun: a program that knows nothing of it is compressed, and ends as without."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from common.launcher import run, torchrun

SECONDS = 100
HERE = Path(__file__).parent
OPTIONS = ("--standalone", "--nproc-per-node=2")


def trained(folder: Path, does: str, steps: int = 8, *, compressed: bool = True, options: tuple = ()) -> tuple:
    """How the program ended, and its output without torchrun's."""
    shutil.copy(HERE / "trains.py", folder)  # here, the package's sources would come first on the path
    ours = ["-m", "hvd_dyncomp", "run", *options] if compressed else []
    line = [*torchrun(*OPTIONS), sys.executable, *ours, "trains.py", does, str(steps)]
    try:
        done: subprocess.CompletedProcess = run(line, timeout=SECONDS, cwd=folder)
    except subprocess.TimeoutExpired as expired:
        raise AssertionError(f"no end after {SECONDS} s\n{expired.output}") from None
    return done.returncode, done.stdout


def weights(output: str) -> str:
    """The sum of the weights, if they are the same on all ranks."""
    [found] = re.findall(r"^weights True (\S+)$", output, flags=re.MULTILINE)
    return found


SAVED = r"^hvd_dyncomp: (\d+) steps at (.+) bits: this rank sent \S+ MB in place of \S+ MB \((\S+)% less\); "


def saved(output: str) -> list:
    """Steps, levels and per cent, by model; rank 0 says it once."""
    return re.findall(SAVED, output, flags=re.MULTILINE)


@pytest.mark.timeout(3 * SECONDS)
def test_a_program_is_compressed_as_it_is(tmp_path):
    status, plain = trained(tmp_path, "nothing", compressed=False)
    assert status == 0, plain
    status, output = trained(tmp_path, "nothing")
    assert status == 0, output
    assert weights(output) != weights(plain)
    assert abs(float(weights(output)) - float(weights(plain))) < 0.1
    [(steps, levels, less)] = saved(output)
    assert (steps, levels) == ("7", "4") and float(less) > 80  # the first step is DDP's own
    status, output = trained(tmp_path, "nothing", options=("--level", "16"))
    assert [levels for _, levels, _ in saved(output)] == ["16"]


@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.thorough
@pytest.mark.parametrize("does", ["spawn", "copy", "fork"])
def test_workers_copies_and_forks_are_as_without(does, tmp_path):
    status, output = trained(tmp_path, does)
    assert status == 0 and weights(output), output
    assert [steps for steps, *_ in saved(output)] == ["7"], output


ENDS = {
    "exit": r"exitcode *: 3 ",
    "raise": r"^(\[rank\d\]: )?ValueError: its own error\n(?s:.*)exitcode *: 1 ",
    "interrupt": r"^(\[rank\d\]: )?KeyboardInterrupt\n(?s:.*)Signal 2 \(SIGINT\)",
}


@pytest.mark.thorough
@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("does", ENDS)
def test_it_ends_as_without_and_says_what_was_saved(does, tmp_path):
    status, output = trained(tmp_path, does)
    assert status == 1 and re.search(ENDS[does], output, flags=re.MULTILINE), output
    assert [steps for steps, *_ in saved(output)] == ["4"], output


@pytest.mark.thorough
@pytest.mark.timeout(3 * SECONDS)
@pytest.mark.parametrize(
    ("does", "why"), [("hook", "given it a communication hook"), ("fully-shard", "fsdp.register_backend")]
)
def test_what_cannot_be_compressed_is_left_alone(does, why, tmp_path):
    status, output = trained(tmp_path, does)
    assert status == 0 and not saved(output), output
    assert len(re.findall(f"^hvd_dyncomp: .*is left as it is: .*{why}", output, flags=re.MULTILINE)) == 1, output
    if does == "hook":
        assert weights(output) == weights(trained(tmp_path, does, compressed=False)[1])


@pytest.mark.timeout(3 * SECONDS)
@pytest.mark.parametrize("steps", [40, pytest.param(26, marks=pytest.mark.thorough)])
def test_a_comparison_has_a_row_for_each_level_and_stops_the_program(steps, tmp_path):
    options = ("--compare", "--steps", "25", "--levels", "32,4,2,0.25")
    status, output = trained(tmp_path, "nothing", steps, options=options)
    assert status == 0 and "weights True" not in output, output
    rows = re.findall(r"^ +([\d.]+) +[\d.]+ +[\d.]+ to [\d.]+ +(\d+) ", output, flags=re.MULTILINE)
    assert rows == [("32", "4"), ("4", "4"), ("2", "4"), ("0.25", "4")], output
    said = [line for line in output.splitlines() if line.startswith("hvd_dyncomp: ")]
    assert [line for line in said if "steps at 32, 4, 2, 0.25 bits" in line and "stops after 25 steps" in line] == said[
        :1
    ]
    [ended] = [line for line in said if "is over and has stopped" in line]
    assert ended.endswith(": -m hvd_dyncomp run --level BITS trains.py nothing " + str(steps))
    assert "below 2 bits were compared in time only" in said[-1] and not saved(output), output


@pytest.mark.thorough
@pytest.mark.timeout(2 * SECONDS)
def test_a_program_that_ends_before_its_comparison_is_told_not_to_keep_anything(tmp_path):
    status, output = trained(tmp_path, "nothing", 12, options=("--compare", "--levels", "32,4", "--steps", "15"))
    assert status == 0 and "weights True" in output and "hvd_dyncomp: ms from one step" in output, output
    assert len(re.findall("^hvd_dyncomp: .* has ended before the comparison; do not use", output, flags=re.M)) == 1
    assert "in time only" not in output
