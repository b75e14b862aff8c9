"""Which way of sending few bits trains best: small trainings of one's own choice, beside those of docs/study.md.

    python launch/study.py --simulate screen --tasks resnet8 --methods "uncompressed;1;0.25" --seeds 3

One process plays all workers of a task and trains it once for every (task, method, seed): see screening/tasks.py
and screening/contenders.py. Each run is a line of --results; runs that are there are not repeated. Printed are, as
Markdown, the means over seeds with their standard errors, and bits a value: of the tensors of 1024 values and more, and
of all.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import re
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from common.errors import RunError
from common.values import count
from screening import results
from screening.contenders import CONTENDERS, shown
from screening.tasks import TASKS, Work, prepare
from screening.trainer import train


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the screening can be told, and its defaults."""
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
        print("\n".join(["tasks:", *TASKS, "", "methods:", *map(shown, CONTENDERS)]))
        return
    tasks, contenders = chosen("--tasks", args.tasks, TASKS), chosen("--methods", args.methods, CONTENDERS)
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    keys = list(itertools.product(tasks, contenders, seeds))
    if not args.table:
        fill(keys, args.results, args.data_dir, jobs=args.jobs)
    there = results.read(args.results)
    print(results.table(there[key] for key in keys if key in there))


def fill(keys: Iterable[results.Key], path: Path, data_dir: Path, *, jobs: int, curves: bool = True) -> None:
    """Train what is not in the results yet, all first seeds first, and add it there.

    Args:
        path: of the results.
        data_dir: where data sets lie.
        jobs: processes at a time.
        curves: are written down whole; otherwise the score of each epoch is.

    Raises:
        RunError: a data set is not there, or the results are not ours.
    """
    there = results.read(path)
    missing = [key for key in sorted(keys, key=lambda key: key[2]) if key not in there]
    if missing:
        results.repair(path)
    one = functools.partial(_one, data_dir=data_dir, path=path, curves=curves)
    if jobs == 1 or len(missing) < 2:
        for key in missing:
            one(key)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        list(pool.map(one, missing))


def chosen(flag: str, names: str, known: Iterable[str]) -> list[str]:
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
    return found


@functools.lru_cache(maxsize=2)
def _work(task: str, data_dir: Path) -> Work:
    return prepare(TASKS[task], data_dir)


def _one(key: results.Key, *, data_dir: Path, path: Path, curves: bool) -> None:
    torch.set_num_threads(1)
    task, contender, seed = key
    found = train(TASKS[task], _work(task, data_dir), CONTENDERS[contender], seed)
    if not curves:
        found["curve"] = [epoch["score"] for epoch in found["curve"]]
    about = {
        "task": task,
        "contender": contender,
        "seed": seed,
        "residuals": "bfloat16",
    }  # float32 where it is not said
    results.append(path, {**about, **found})
    print(
        f"{task}, {shown(contender)}, seed {seed}: {found['score']:.2f} % at {found['all_bits']:.3f} bits", flush=True
    )
