"""`python -m hvd_dyncomp run` in one process: programs find what Python gives them, and arguments are checked."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch.nn.parallel import DistributedDataParallel

from hvd_dyncomp.__main__ import main
from hvd_dyncomp.commands.run.comparison import STEPS_PER_VISIT, WARM_UP, Comparison
from hvd_dyncomp.commands.run.models import Models
from hvd_dyncomp.commands.run.patches import changed

PROGRAM = """
import atexit, pickle, sys, threading, time

class Mine:
    pass

def late():
    time.sleep(0.2)
    print("late", type(pickle.loads(pickle.dumps(Mine()))), flush=True)

atexit.register(lambda: print("at exit", len(pickle.dumps(Mine()))))
threading.Thread(target=late).start()
print(__name__, __file__, __package__, getattr(__spec__, "name", None), sys.argv, sys.path[0])
print(sorted(set(globals()) - {"__annotations__"}))
print(sys.modules["__main__"].Mine is Mine, late.__annotations__)
sys.exit(sys.argv[1] if sys.argv[1:] == ["words"] else len(sys.argv))
"""
ALONE = "hvd_dyncomp: one process exchanges nothing: "


def python(folder: Path, *line: str) -> tuple[int, str, list[str]]:
    """Status, output and what was said besides."""
    done = subprocess.run([sys.executable, *line], cwd=folder, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr.splitlines()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("programs")
    for name in ("train.py", "own/__main__.py", "own/inner.py", "other/train.py"):
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(PROGRAM)
    (path / "own" / "linked.py").symlink_to(path / "other" / "train.py")
    return path


@pytest.mark.parametrize(
    "line",
    [
        ["train.py", "--level", "8", "-m", "--", "-h"],
        ["-m", "own.inner", "--compare"],
        ["own", "words"],
        ["own/linked.py"],
        ["-m", "own.missing"],
    ],
    ids=" ".join,
)
def test_a_program_finds_what_python_gives_it(line, folder):
    status, output, said = python(folder, *line)
    *ours, (alone, *others) = python(folder, "-m", "hvd_dyncomp", "run", *line)
    assert ours == [status, output] and alone.startswith(ALONE) and others == said
    assert status and (output or said)


def test_a_traceback_ends_with_the_programs_own_frames(folder):
    (folder / "fails.py").write_text("def train():\n    raise ValueError('mine')\n\n\ntrain()\n")
    status, _, said = python(folder, "fails.py")
    ours = python(folder, "-m", "hvd_dyncomp", "run", "fails.py")
    assert ours[0] == status == 1 and ours[2][-len(said) + 1 :] == said[1:]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ([], "the following arguments are required: PROGRAM"),
        (["missing.py"], "no such file: missing.py"),
        (["--level", "9", "train.py"], "argument --level: '9' is not one of the levels 0.125, "),
        (["--compare", "--levels", "4,x", "train.py"], "argument --levels: 'x' is not one of the levels 0.125, "),
        (["--compare", "--steps", "19", __file__], "argument --steps: 3 levels need at least 20, got 19"),
        (["--steps", "30", __file__], "--levels and --steps belong to --compare"),
        (
            ["--compare", "--then", "go", __file__],
            "argument --then: a comparison now always stops the program; leave out",
        ),
        (["--lev", "4", __file__], "unrecognized arguments: --lev"),
    ],
)
def test_bad_arguments_are_errors_of_one_line(line, why, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["run", *line])
    assert ended.value.code == 2
    usage, error = capsys.readouterr().err.splitlines()
    assert usage.startswith("usage: python -m hvd_dyncomp")
    assert re.search(f": error: {why}", error), error


def compared_steps(comparison: Comparison, seconds: dict[float, float], steps: int) -> list[float]:
    """Make steps as a quantizer does, and return their levels. The first one of each level takes 10 s longer."""
    used: list[float] = []
    now = 0.0
    for _ in range(steps):
        assert not comparison.over
        used.append(comparison.bits)
        comparison.meter.at(0, comparison.bits).steps += 1
        now += seconds[used[-1]] + (10 if len(used) > 1 and used[-1] != used[-2] else 0)
        comparison.on_step_end(now)
        comparison.on_step_end(now + 0.001)  # a step of the optimizer without an exchange
    return used


def test_levels_take_turns_and_the_first_step_of_each_does_not_count():
    steps = WARM_UP + 4 * STEPS_PER_VISIT
    compared = Comparison(2, [32, 4], steps)
    used = compared_steps(compared, {32: 0.008, 4: 0.004, 2: 1.0}, steps)
    turns = [32] * STEPS_PER_VISIT + [4] * STEPS_PER_VISIT
    assert used == [*[2] * WARM_UP, *turns, *turns] and compared.over and compared.bits == 2
    assert {level: len(times) for level, times in compared.seconds.items()} == dict.fromkeys((32, 4), 8)
    assert [line.split() for line in compared.table().splitlines()[2:]] == [
        ["32", "8.00", "8.00", "to", "8.00", "8", "1.00"],
        ["4", "4.00", "4.00", "to", "4.00", "8", "0.50"],
    ]


def test_several_exchanges_between_two_ends_count_only_at_one_level():
    compared = Comparison(4, [32, 4], WARM_UP + 2 * STEPS_PER_VISIT)
    for end in range(1, 6):
        compared.meter.at(0, 4).steps += 3
        compared.on_step_end(3.0 * end)
    assert dict(compared.seconds) == {32: [1.0], 4: [1.0]}  # steps 6 to 8 and 12 to 14


def test_a_table_may_have_gaps():
    compared = Comparison(4, [32, 4], WARM_UP + 2 * STEPS_PER_VISIT)
    compared_steps(compared, {32: 1.0, 4: 1.0}, WARM_UP + 3)
    assert [line.split()[:2] for line in compared.table().splitlines()[2:]] == [["32", "1000.00"], ["4", "-"]]


def test_torch_is_as_before_afterwards():
    from torch.distributed.fsdp import FSDPModule

    before = vars(DistributedDataParallel)["__init__"], "__init_subclass__" in vars(FSDPModule)
    with pytest.raises(KeyError), changed(Models(4)):
        assert DistributedDataParallel.__init__ is not before[0] and "__init_subclass__" in vars(FSDPModule)
        raise KeyError
    assert (vars(DistributedDataParallel)["__init__"], "__init_subclass__" in vars(FSDPModule)) == before
