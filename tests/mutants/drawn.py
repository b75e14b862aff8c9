"""Do the tests notice small changes of the library? Tries mutants (operators.py), drawn at random, until time is up.

    make mutants ARGS="exchange/step.py policies --minutes 10"

Without names: the files that differ from the main branch or, on it, from the last version; if none does, exchange/ and
policies/. Of the tests that run a line (reach.py) the quick ones go first, and none beyond --seconds in all.
"""

from __future__ import annotations

import argparse
import difflib
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path

import mutate
import operators
import reach

USUAL = ("exchange", "policies")
KILLED, SURVIVED, NOT_RUN = "killed", "survived", "run by no test of one process"


def changed() -> list[str]:
    """The library's files that differ from the main branch or, where none does, from the last version."""
    git = ["git", "-C", str(mutate.TESTS.parent)]
    asked = [*git, "diff", "--name-only", "--diff-filter=d", "--relative=hvd_dyncomp", "--merge-base"]
    last = subprocess.run([*git, "describe", "--tags", "--abbrev=0"], capture_output=True, text=True, check=False)
    for base in ["main", *last.stdout.split()]:
        found = subprocess.run([*asked, base], capture_output=True, text=True, check=False).stdout.split()
        if files := [name for name in found if name.endswith(".py")]:
            return files
    return []


def files_of(package: Path, names: list[str]) -> list[str]:
    """The files that are named, or that are in a folder that is."""
    found = []
    for name in names:
        paths = sorted((package / name).rglob("*.py")) if (package / name).is_dir() else [package / name]
        found += [str(path.relative_to(package)) for path in paths if path.exists()]
    if not found:
        raise SystemExit(f"mutants: none of {', '.join(names)} is a file or folder in hvd_dyncomp/")
    return found


def difference(before: str, after: str) -> str:
    """The lines that differ, on one."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm="")
    return "  ".join(f"{line[0]} {line[1:].strip()}" for line in list(lines)[2:] if line[0] in "+-")[:240]


def drawn(package: Path, files: list[str], seed: int) -> list[operators.Mutant]:
    """All mutants of the files, in an order that the seed decides."""
    mutants = [mutant for file in files for mutant in operators.mutants(package, file)]
    random.Random(seed).shuffle(mutants)
    return mutants


def verdicts(
    mutants: Iterator[operators.Mutant], reached: reach.Reach, options: argparse.Namespace
) -> Iterator[tuple[operators.Mutant, str, str]]:
    """Tries one after the other until time is up; yields each with what became of it and by which test."""
    until = time.monotonic() + 60 * options.minutes
    waiting: dict[Future, operators.Mutant] = {}
    with ProcessPoolExecutor(options.jobs, mp_context=mutate.FORKS) as pool:
        while True:
            while len(waiting) < options.jobs and time.monotonic() < until and (mutant := next(mutants, None)):
                if (text := mutant.text()) is None:
                    continue
                tests = reached.tests(mutant.file, mutant.lines, options.seconds)
                if tests:
                    waiting[pool.submit(mutate.changed, mutant.file, text, tests)] = mutant
                else:
                    yield mutant, NOT_RUN, ""
            if not waiting:
                return
            for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                by = future.result()
                yield waiting.pop(future), KILLED if by else SURVIVED, by


def table(counts: dict[str, Counter]) -> str:
    """By file and in all, how many were tried, and what became of them."""
    rows = [*sorted(counts.items()), ("in all", sum(counts.values(), Counter()))]
    lines = [
        f"| {file} | {count.total()} | {count[KILLED]} | {count[SURVIVED]} | {count[NOT_RUN]} |" for file, count in rows
    ]
    return "\n".join([f"| file | tried | {KILLED} | {SURVIVED} | {NOT_RUN} |", "| --- " + "| ---: " * 4 + "|", *lines])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help="files and folders in hvd_dyncomp/")
    parser.add_argument("--seed", type=int, default=0, help="which mutants are drawn")
    parser.add_argument("--most", type=int, help="how many are tried")
    parser.add_argument("--minutes", type=float, default=20, help="no other one is begun after that")
    parser.add_argument("--seconds", type=float, default=30, help="of tests, until a mutant counts as unnoticed")
    parser.add_argument("--jobs", type=int, default=2, help="how many are tried at a time")
    options = parser.parse_args()
    package = mutate.installed_package()
    mutate.import_once()
    files = files_of(package, options.names or changed() or list(USUAL))
    reached = reach.reach(files, options.jobs)
    mutants = drawn(package, files, options.seed)
    counts: dict[str, Counter] = {}
    by_tests = []
    for mutant, verdict, by in verdicts(iter(mutants[: options.most]), reached, options):
        counts.setdefault(mutant.file, Counter())[verdict] += 1
        by_tests += [by] if by else []
        if verdict != KILLED:
            what = difference(mutant.module.code, mutant.text() or "")
            print(f"{mutant.file}:{mutant.lines[0]} {verdict}: {what}", flush=True)
    print(table(counts))
    tried = sum(counts.values(), Counter())
    noticed = tried[KILLED] / max(1, tried[KILLED] + tried[SURVIVED])
    print(f"{tried.total()} of {len(mutants)} mutants drawn with seed {options.seed}")
    print(f"{noticed:.1%} of those that tests run are killed")
    return mutate.say_what_fails_anyway(by_tests, options.jobs)


if __name__ == "__main__":
    sys.exit(main())
