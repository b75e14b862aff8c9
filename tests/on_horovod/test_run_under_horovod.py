"""`python -m hvd_dyncomp run` under horovodrun: an optimizer of Horovod's is compressed as the program is."""

import re
import sys
from pathlib import Path

import pytest
from launchers import LAUNCHERS, run_limited

SAVED = r"hvd_dyncomp: (\d+) steps at (.+) bits: this rank sent \S+ MB in place of \S+ MB \((\S+)% less\)"


def trained(*arguments):
    """Status and output; -P, and the program's full path, as the sources must not come first on the path."""
    program = str(Path(__file__).with_name("trains.py"))
    ours = [sys.executable, "-P", "-m", "hvd_dyncomp", "run"]
    where = [program if argument == "PROGRAM" else argument for argument in arguments]
    done = run_limited([*LAUNCHERS["horovodrun"], "-np", "2", *ours, *where], 120)
    return done.returncode, done.stdout


@pytest.mark.timeout(150)
def test_an_optimizer_is_compressed():
    status, output = trained("--level", "8", "PROGRAM")
    assert status == 0 and output.count("same weights: True") == 1, output
    [(steps, level, less)] = re.findall(SAVED, output)
    assert (steps, level) == ("30", "32, 8") and float(less) > 65  # the first step is Horovod's


@pytest.mark.thorough
@pytest.mark.timeout(150)
def test_one_with_a_compression_of_its_own_is_left_alone():
    status, output = trained("PROGRAM", "own")
    assert status == 0 and output.count("same weights: True") == 1, output
    assert not re.findall(SAVED, output) and output.count("the program has passed compression=") == 1, output


@pytest.mark.thorough
@pytest.mark.timeout(150)
def test_a_comparison_stops():
    status, output = trained("--compare", "--steps", "20", "--levels", "32,4", "PROGRAM")
    assert status == 0 and "same weights" not in output, output
    rows = re.findall(r"^.*  +(\d+) +[\d.]+ +[\d.]+ to [\d.]+ +(\d+) ", output, flags=re.MULTILINE)
    assert rows == [("32", "8"), ("4", "4")] and output.count("is over and has stopped the program") == 1, output
