"""Which tests of one process run which lines of the library, by coverage: measured once for each state of both."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mutate

KEPT = mutate.TESTS.parent / "build" / "reach.json"


@dataclass
class Reach:
    """`lines[file][line]` are the tests that run it, and `seconds[test]` how long one takes."""

    lines: dict[str, dict[int, list[str]]]
    seconds: dict[str, float]

    def tests(self, file: str, lines: tuple[int, int], most: float) -> list[str]:
        """Those that run the lines, quick ones first, of `most` seconds in all; of the file, where all run them."""
        found = {test for line in range(lines[0], lines[1] + 1) for test in self.lines.get(file, {}).get(line, [])}
        if "" in found:  # run when the package is imported
            found = {test for tests in self.lines[file].values() for test in tests if test}
        chosen: list[str] = []
        for test in sorted(found, key=lambda test: (self.seconds[test], test)):
            if chosen and sum(self.seconds[one] for one in chosen) + self.seconds[test] > most:
                break
            chosen.append(test)
        return chosen


class _Contexts:
    """A plugin of pytest that tells coverage which test runs, and counts their seconds on a processor."""

    def __init__(self, coverage: Any):
        self.coverage = coverage
        self.began = 0.0
        self.seconds: dict[str, float] = defaultdict(float)
        self.failed: set[str] = set()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.coverage.switch_context(_plain(nodeid))
        self.began = time.process_time()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.coverage.switch_context("")
        self.seconds[_plain(nodeid)] += time.process_time() - self.began

    def pytest_runtest_logreport(self, report: Any) -> None:
        if not report.passed:
            self.failed.add(_plain(report.nodeid))


def _plain(nodeid: str) -> str:
    """A test by its function, whatever its parameters, as seen from tests/."""
    return nodeid.partition("[")[0].removeprefix("tests/")


def measured(file: str) -> Reach:
    """Runs a file of tests, in a process that has all but this package, and returns what it reaches."""
    import coverage
    import pytest

    package = mutate.installed_package()
    measure = coverage.Coverage(data_file=None, source=[str(package)], config_file=False)
    plugin = _Contexts(measure)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.path[:0] = [str(package.parent)]
    measure.start()
    pytest.main(["-q", "--tb=no", "-p", "no:cacheprovider", str(mutate.TESTS / file)], [plugin])
    measure.stop()
    data = measure.get_data()
    lines = {
        str(Path(file).relative_to(package)): {
            line: sorted(set(tests) - plugin.failed) for line, tests in data.contexts_by_lineno(file).items()
        }
        for file in data.measured_files()
    }
    return Reach(lines, dict(plugin.seconds))


def _contents() -> Iterator[bytes]:
    for folder in (mutate.installed_package(), mutate.TESTS):
        for file in sorted(folder.rglob("*.py")):
            if file.parent != mutate.HERE:
                yield file.read_bytes()


def reach(files: list[str], jobs: int) -> Reach:
    """As it is in build/, or measured anew where a file of the library or of the tests is another."""
    tests = sorted({test for file in files for test in mutate.files_that_see(file)})
    key = hashlib.sha256(b"\0".join([repr(tests).encode(), *_contents()])).hexdigest()
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    if kept.get("key") != key:
        # A process for each file, which has yet to import the package. Large files first: none is left to the end.
        largest = sorted(tests, key=lambda name: -(mutate.TESTS / name).stat().st_size)
        with mutate.FORKS.Pool(jobs, maxtasksperchild=1) as pool:
            parts = pool.map(measured, largest, chunksize=1)
        lines: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        for part in parts:
            for file, by_line in part.lines.items():
                for line, names in by_line.items():
                    lines[file][line].update(names)
        kept = {
            "key": key,
            "lines": {file: {n: sorted(names) for n, names in by.items()} for file, by in lines.items()},
            "seconds": {test: value for part in parts for test, value in part.seconds.items()},
        }
        KEPT.parent.mkdir(exist_ok=True)
        KEPT.write_text(json.dumps(kept))
    numbered = {file: {int(n): names for n, names in by.items()} for file, by in kept["lines"].items()}
    return Reach(numbered, kept["seconds"])
