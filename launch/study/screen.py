"""Which way of sending few bits trains best: small trainings of one's own choice, beside those of docs/study.md.

    python launch/study screen --tasks resnet8 --methods "uncompressed;1;0.25" --seeds 3

One process plays all workers of a task and trains it once for every (task, method, seed): see study/tasks.py and
study/methods.py. Each run is a line of --results; runs that are there are not repeated. Printed are bits a value, and
differences to uncompressed gradients, which the methods should include: means over seeds with their standard errors.
"""

from __future__ import annotations

import argparse
import functools
import re
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from common.errors import RunError
from common.values import count
from study import matrix, record
from study.methods import METHODS, shown
from study.parts import Part
from study.tasks import TASKS, Work, prepare
from study.trainer import train


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the screening can be told, and its defaults."""
    parser.set_defaults(run=run)
    add = parser.add_argument
    add("--tasks", default="resnet8", metavar="NAMES", help="separated by semicolons (default resnet8)")
    add("--methods", default="uncompressed;1;0.25", metavar="NAMES", help="likewise; * stands for any characters")
    add("--seeds", default="1", metavar="N", type=count, help="runs of each (default 1)")
    add("--first-seed", default=0, metavar="N", type=int, help="number of the first seed (default 0)")
    add("--jobs", type=count, default=1, metavar="N", help="processes at a time (default 1)")
    add("--results", type=Path, default=Path("screen.jsonl"), metavar="FILE", help="default screen.jsonl")
    add("--data-dir", type=Path, default=Path("data"), metavar="DIR", help="where data sets lie (default data)")
    add("--table", action="store_true", help="of the runs that are there; train nothing")
    add("--list", action="store_true", help="the names of all tasks and methods")


def run(args: argparse.Namespace) -> None:
    """Train what is missing and print the table.

    Raises:
        RunError: a name is unknown, a data set is not there, or the results are not ours.
    """
    if args.list:
        print("\n".join(["tasks:", *TASKS, "", "methods:", *map(shown, METHODS)]))
        return
    tasks, methods = chosen("--tasks", args.tasks, TASKS), chosen("--methods", args.methods, METHODS)
    part = Part("screen", tasks, methods, args.seeds, seed=args.first_seed)
    if not args.table:
        fill(part.keys, args.results, args.data_dir, jobs=args.jobs)
    print(matrix.table(part, record.read(args.results)))


def fill(keys: Iterable[record.Key], path: Path, data_dir: Path, *, jobs: int, curves: bool = True) -> None:
    """Train what is not in the results yet, all first seeds first, and add it there.

    Args:
        path: of the results.
        data_dir: where data sets lie.
        jobs: processes at a time.
        curves: are written down whole; otherwise the score of each epoch is.

    Raises:
        RunError: a data set is not there, or the results are not ours.
    """
    there = record.read(path)
    missing = [key for key in sorted(keys, key=lambda key: key[2]) if key not in there]
    if missing:
        record.repair(path)
    one = functools.partial(_one, data_dir=data_dir, path=path, curves=curves)
    if jobs == 1 or len(missing) < 2:
        for key in missing:
            one(key)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        list(pool.map(one, missing))


def chosen(flag: str, names: str, known: Iterable[str]) -> tuple[str, ...]:
    """The known names that `names` stands for, in its order.

    Raises:
        RunError: one of them stands for none.
    """
    found: list[str] = []
    for name in names.split(";"):
        pattern = re.compile(".*".join(map(re.escape, name.strip().split("*"))))
        some = [other for other in known if pattern.fullmatch(shown(other)) or pattern.fullmatch(other)]
        if not some:
            raise RunError(f"{flag}: {name.strip()!r} is not one of those that --list names")
        found += [other for other in some if other not in found]
    return tuple(found)


@functools.lru_cache(maxsize=2)
def _work(task: str, data_dir: Path) -> Work:
    return prepare(TASKS[task], data_dir)


def _one(key: record.Key, *, data_dir: Path, path: Path, curves: bool) -> None:
    torch.set_num_threads(1)
    task, method, seed = key
    found = train(TASKS[task], _work(task, data_dir), METHODS[method], seed)
    if not curves:
        found["curve"] = [epoch["score"] for epoch in found["curve"]]
    about = {
        "task": task,
        "contender": method,
        "seed": seed,
        "residuals": "bfloat16",
    }  # float32 where it is not said
    record.append(path, {**about, **found})
    print(f"{task}, {shown(method)}, seed {seed}: {found['score']:.2f} % at {found['all_bits']:.3f} bits", flush=True)
