"""Do the tests notice faults that no tool thinks of? Puts those of faults.toml into copies of the package.

    make faults ARGS="--only residuals.py"

For every fault the tests that it names come first. Where they pass and the list gives no reason, all others of one
process follow that can see the file. At the end the tests that have noticed something run without any fault.
A fault that survives without a reason, or is noticed in spite of one, makes the status 1; so does a test that fails
anyway.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent
sys.path[:0] = [str(TESTS.parent / "launch"), str(TESTS / "on_horovod")]

from launchers import BODIES, run_body  # noqa: E402

from common.launcher import end  # noqa: E402

LIMIT = 120  # seconds for a test, and for a run of pytest as often as `RUN`: a fault may make them wait for ever
RUN = 8
NO_TEST = ("no end", "pytest ended")  # so begins what is said where no test has failed
# In a test that fails anyway nobody needs the smallest example; and what is noticed once should be noticed always.
PLUGIN = """
from hypothesis import Phase, settings
settings.register_profile("mutants", phases=[Phase.explicit, Phase.generate], derandomize=True, database=None)
settings.load_profile("mutants")
"""

# Sources are not in the package, and the sanitizers compile sources of their own.
APART = {"test_security.py", "test_sanitizers.py"}
STARTS_RANKS = re.compile(r"^from (launchers|torchrun|netlab)\b", flags=re.MULTILINE)

# What tests import takes longer than most of them: every run is a fork of a process that has it. Torch imports the last
# of these when the first optimizer is made.
IMPORTED = ("pytest", "hypothesis.extra.numpy", "hypothesis.stateful", "horovod.torch", "torch._dynamo")
FORKS = multiprocessing.get_context("fork")


@dataclass
class Fault:
    """One entry of faults.toml, which says what the fields are."""

    file: str
    wrong: str
    there: str
    instead: str
    tests: list[str] = field(default_factory=list)
    survives: str = ""

    def __str__(self) -> str:
        return f"{self.file}: {self.wrong}"

    def applied(self, text: str) -> str:
        """The file's text with the fault in it.

        Raises:
            ValueError: what is to be replaced is not there, or more than once: the list is out of date.
        """
        if text.count(self.there) != 1 or self.there == self.instead:
            raise ValueError(f"{self}: found {text.count(self.there)} times, not once:\n{self.there}")
        return text.replace(self.there, self.instead)


def read_faults() -> list[Fault]:
    """All of faults.toml."""
    return [Fault(**entry) for entry in tomllib.loads((HERE / "faults.toml").read_text())["fault"]]


def installed_package() -> Path:
    """Where the installed package is."""
    spec = importlib.util.find_spec("hvd_dyncomp")
    if spec is None or spec.origin is None or Path(spec.origin).is_relative_to(TESTS.parent / "hvd_dyncomp"):
        raise SystemExit("mutants: hvd_dyncomp must be installed: run 'make setup'")
    return Path(spec.origin).parent


def files_that_see(file: str) -> list[str]:
    """The test files of one process that can see a file of the library, by what imports what."""
    below = file.startswith(("kernels/", "checks", "levels"))
    above = ("", "exchange", "transport", "policies", "integrations", "on_horovod", "ddp", "fsdp")
    folders = [TESTS / name for name in (*(["kernels"] if below else []), *above)]
    files = [path for folder in folders for path in sorted(folder.glob("test_*.py")) if path.name not in APART]
    return [str(path.relative_to(TESTS)) for path in files if not STARTS_RANKS.search(path.read_text())]


def import_once() -> None:
    """Imports what tests import, but for this package and themselves."""
    import torch

    # Torch imports Triton, which decides then whether to interpret its own functions, for the tests that want it to.
    interpret = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    with patch.dict(os.environ, interpret):
        for name in IMPORTED:
            importlib.import_module(name)


class Failed:
    """A plugin of pytest that writes down which test fails, by the name that runs it alone."""

    def __init__(self, file: Path):
        self.file = file

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.file.write_text(report.nodeid)


def in_child(folder: Path, tests: list[str], limit: int) -> None:
    """Runs tests on the package in `folder`. In a process that has all but this package already."""
    out = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(folder)
    sys.dont_write_bytecode = False  # the next fault's tests need not be compiled again
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = str(folder)
    import pytest

    options = ["-q", "-x", "--tb=no", "--color=no", "-p", "no:cacheprovider", "-p", "no_shrinking"]
    options += ["-m", "not soak and not clusters and not release"]  # those of make test-all, too
    status = pytest.main(
        [*options, f"--timeout={limit}", *[str(TESTS / test) for test in tests]], plugins=[Failed(folder / "failed")]
    )
    sys.stdout.flush()
    os._exit(status)  # what waits in a thread, or for other ranks, is not waited for


def one_process(package: Path, tests: list[str], limit: int = LIMIT) -> str:
    """Runs tests, each for `limit` seconds, on a copy of the package; returns the first that fails, "" for none."""
    folder = package.parent
    child = FORKS.Process(target=in_child, args=(folder, tests, limit))
    child.start()
    child.join(RUN * limit)
    if child.is_alive():
        end(child.pid or 0)
        return f"{NO_TEST[0]} after {RUN * limit} s"
    if child.exitcode == 0:
        return ""
    if (folder / "failed").exists():
        return (folder / "failed").read_text().removeprefix("tests/")
    return f"{NO_TEST[1]} with {child.exitcode}: {(folder / 'log').read_text()[-300:]!r}"


def body(package: Path, name: str) -> str:
    """The same for a body of checks on two real ranks."""
    try:
        run_body(name, "mpirun", 2, PYTHONPATH=str(package.parent), HOROVOD_DYNAMIC_PROCESS_SETS="1", PY_COLORS="0")
    except AssertionError as failed:
        found = re.search(r"FAILED (\S+)", str(failed))
        return f"{name}: {found[1].split('::')[-1] if found else 'on two ranks'}"
    return ""


@contextmanager
def copy_of_package(file: str = "", text: str = "") -> Iterator[Path]:
    """A copy of the installed package, with another text in one file."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        package = Path(folder) / "hvd_dyncomp"
        shutil.copytree(installed_package(), package)
        (Path(folder) / "no_shrinking.py").write_text(PLUGIN)
        if file:
            (package / file).write_text(text)
            Path(importlib.util.cache_from_source(package / file)).unlink(missing_ok=True)
        yield package


def changed(file: str, text: str, tests: list[str]) -> str:
    """Which of the tests notices another text of one file; "" for none. Most do at once, so few are imported first."""
    with copy_of_package(file, text) as package:
        few = one_process(package, tests[:10], limit=LIMIT // 4)
        return few or (one_process(package, tests[10:], limit=LIMIT // 4) if tests[10:] else "")


def tried(fault: Fault | None, tests: list[str]) -> tuple[str, float]:
    """Puts the fault (None: none) into a copy; returns which of the tests notices it, "" for none, and the seconds."""
    began = time.monotonic()
    file = fault.file if fault else ""
    text = fault.applied((installed_package() / file).read_text()) if fault else ""
    with copy_of_package(file, text) as package:
        return noticed(package, fault, tests), time.monotonic() - began


def noticed(package: Path, fault: Fault | None, tests: list[str]) -> str:
    """The first of the tests that fails and, where a fault's own tests pass, of all that can see it."""
    bodies = [test for test in tests if (BODIES / f"test_{test}.py").exists()]
    files = [test for test in tests if test not in bodies]
    by = one_process(package, files) if files else ""
    for name in bodies:
        by = by or body(package, name)
    if by or fault is None or fault.survives:
        return by
    return one_process(package, [file for file in files_that_see(fault.file) if file not in files])


def verdict(fault: Fault, by: str) -> tuple[str, bool]:
    """One cell for the table, and whether it is as the list says."""
    if by:
        return f"killed | {by}", not fault.survives
    return f"survived | {fault.survives or 'nobody noticed'}", bool(fault.survives)


def without_a_fault(by_tests: list[str], jobs: int) -> tuple[list[None], list[list[str]]]:
    """Arguments of `tried` that run once, in so many parts, what has noticed faults."""
    ran = [test for test in by_tests if not test.startswith(NO_TEST)]
    names = sorted({test if "::" in test else test.split(":")[0] for test in ran})
    tests = [name for name in names if "::" in name or (BODIES / f"test_{name}.py").exists()]
    return [None] * jobs, [tests[part::jobs] for part in range(jobs)]


def say_what_fails_anyway(by_tests: list[str], jobs: int) -> int:
    """Runs what has noticed something without any fault; 1 if something fails."""
    with ProcessPoolExecutor(jobs, mp_context=FORKS) as pool:
        anyway = [failed for failed, _ in pool.map(tried, *without_a_fault(by_tests, jobs)) if failed]
    print("without a fault:", " and ".join(anyway) + " fails, too" if anyway else "all of these tests pass")
    return int(bool(anyway))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="a regular expression, found in a fault's file and words")
    parser.add_argument("--jobs", type=int, default=2, help="faults that are tried at a time")
    options = parser.parse_args()
    faults = [fault for fault in read_faults() if re.search(options.only, str(fault))]
    if not faults:
        raise SystemExit(f"mutants: no fault has {options.only!r} in its file or words")
    import_once()
    with ProcessPoolExecutor(options.jobs, mp_context=FORKS) as pool:
        print("| fault | verdict | by | s |\n| --- | --- | --- | ---: |", flush=True)
        wrong, by_tests = 0, []
        for fault, (by, seconds) in zip(
            faults, pool.map(tried, faults, [fault.tests for fault in faults]), strict=True
        ):
            text, right = verdict(fault, by)
            print(f"| {fault} | {text} | {seconds:.0f} |{'' if right else ' <-- not as the list says'}", flush=True)
            wrong += not right
            by_tests += [by] if by else []
    print(f"{len(by_tests)} of {len(faults)} killed; {wrong} not as the list says")
    return say_what_fails_anyway(by_tests, options.jobs) or int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
