"""Do the tests notice our own faults? Puts those of faults.toml into copies of the package, and runs the tests.

    make mutants ARGS="--only residuals.py"

For every fault the tests that it names come first and, if they pass, all others of one process that can see the file.
A fault that survives without a reason in the list, or is noticed in spite of one, makes the status 1.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent
sys.path[:0] = [str(TESTS.parent / "launch"), str(TESTS / "parallel")]

from launchers import BODIES, run_body  # noqa: E402

from common.launcher import end  # noqa: E402

SECONDS = 900  # for one run of pytest: a fault may make tests wait for ever
# In a test that fails anyway nobody needs the smallest example; and what is noticed once should be noticed always.
PLUGIN = """
from hypothesis import Phase, settings
settings.register_profile("mutants", phases=[Phase.explicit, Phase.generate], derandomize=True, database=None)
settings.load_profile("mutants")
"""

# Torch and Horovod take longer to import than most tests take: all runs are forks of one process that has them.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["horovod.torch", "hypothesis", "pytest"])


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


def files_that_see(faults: list[Fault]) -> list[str]:
    """The test files of one process that can see the faults' files, by what imports what."""
    below = any(fault.file.startswith(("kernels/", "checks", "levels")) for fault in faults)
    folders = [*([TESTS / "kernels"] if below else []), TESTS, TESTS / "exchange"]
    # Set-up and sources are not in the package, and the sanitizers compile sources of their own.
    apart = {"test_setup.py", "test_security.py", "test_sanitizers.py"}
    files = [file for folder in folders for file in sorted(folder.glob("test_*.py")) if file.name not in apart]
    return [str(file.relative_to(TESTS)) for file in files]


def in_child(folder: str, tests: list[str], log: str) -> None:
    """Runs tests on the package in `folder`. In a process that has torch and Horovod, but not this package, already."""
    out = os.open(log, os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(folder)
    sys.dont_write_bytecode = True
    sys.path.insert(0, folder)
    os.environ |= {"PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
    import pytest

    options = ["-q", "-x", "--tb=no", "--color=no", "-p", "no:cacheprovider", "-p", "no_shrinking", "--timeout=120"]
    status = pytest.main([*options, *[str(TESTS / test) for test in tests]])
    sys.stdout.flush()
    os._exit(status)  # what waits in a thread, or for other ranks, is not waited for


def one_process(package: Path, tests: list[str]) -> str:
    """Runs tests on a copy of the package, until one fails; returns what has failed, "" for nothing."""
    log = package.with_name("log")
    child = FORKS.Process(target=in_child, args=(str(package.parent), tests, str(log)))
    child.start()
    child.join(SECONDS)
    if child.is_alive():
        end(child.pid or 0)
        return f"no end after {SECONDS} s"
    said = log.read_text()
    log.unlink()
    if child.exitcode == 0:
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
    if failed is None:
        return f"pytest ended with {child.exitcode}: {said[-300:]!r}"
    return failed[1].split("tests/")[-1]


def body(package: Path, name: str) -> str:
    """The same for a body of checks on two real ranks."""
    try:
        run_body(name, "mpirun", 2, PYTHONPATH=str(package.parent), HOROVOD_DYNAMIC_PROCESS_SETS="1", PY_COLORS="0")
    except AssertionError as failed:
        found = re.search(r"FAILED (\S+)", str(failed))
        return f"{name} on two ranks" + (f": {found[1].split('::')[-1]}" if found else "")
    return ""


def tried(fault: Fault | None, tests: list[str]) -> tuple[str, float]:
    """Puts the fault (None: none) into a copy; returns which of the tests notices it, "" for none, and the seconds."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        package = Path(folder) / "hvd_dyncomp"
        shutil.copytree(installed_package(), package, ignore=shutil.ignore_patterns("__pycache__"))
        (Path(folder) / "no_shrinking.py").write_text(PLUGIN)
        if fault is not None:
            file = package / fault.file
            file.write_text(fault.applied(file.read_text()))
        return noticed(package, fault, tests), time.monotonic() - began


def noticed(package: Path, fault: Fault | None, tests: list[str]) -> str:
    """The first of the tests that fails and, where a fault's own tests pass, of all that can see it."""
    bodies = [test for test in tests if (BODIES / f"{test}.py").exists()]
    files = [test for test in tests if test not in bodies]
    by = one_process(package, files) if files else ""
    for name in bodies:
        by = by or body(package, name)
    if by or fault is None:
        return by
    return one_process(package, [file for file in files_that_see([fault]) if file not in files])


def verdict(fault: Fault, by: str) -> tuple[str, bool]:
    """One cell for the table, and whether it is as the list says."""
    if by:
        return f"killed | {by}", not fault.survives
    return f"survived | {fault.survives or 'nobody noticed'}", bool(fault.survives)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="a regular expression, found in a fault's file and words")
    parser.add_argument("--jobs", type=int, default=2, help="faults that are tried at a time")
    options = parser.parse_args()
    faults = [fault for fault in read_faults() if re.search(options.only, str(fault))]
    if not faults:
        raise SystemExit(f"mutants: no fault has {options.only!r} in its file or words")
    named = {test for fault in faults for test in fault.tests}
    print("without a fault: ", end="", flush=True)
    failed, seconds = tried(None, sorted(named | {*files_that_see(faults)}))
    print(failed or "all tests pass", f"({seconds:.0f} s)", flush=True)
    if failed:
        return 1
    print("| fault | verdict | by | s |\n| --- | --- | --- | ---: |", flush=True)
    wrong = killed = 0

    def attempt(fault: Fault) -> tuple[Fault, str, float]:
        return fault, *tried(fault, fault.tests)

    with ThreadPoolExecutor(options.jobs) as pool:
        for fault, by, seconds in pool.map(attempt, faults):
            text, right = verdict(fault, by)
            print(f"| {fault} | {text} | {seconds:.0f} |{'' if right else ' <-- not as the list says'}", flush=True)
            wrong, killed = wrong + (not right), killed + bool(by)
    print(f"{killed} of {len(faults)} killed; {wrong} not as the list says")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
