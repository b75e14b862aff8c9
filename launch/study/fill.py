"""Trains the runs that a record lacks, and adds each as a line."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from study import record
from study.methods import METHODS, shown
from study.tasks import TASKS, Work, prepare
from study.trainer import train


def fill(keys: Iterable[record.Key], path: Path, data_dir: Path, *, jobs: int) -> None:
    """Train what is not in the record yet, all first seeds first.

    Args:
        path: of the record.
        data_dir: where data sets lie.
        jobs: processes at a time.

    Raises:
        RunError: a data set is not there, or the record is not ours.
    """
    there = record.read(path)
    missing = [key for key in sorted(keys, key=lambda key: key[2]) if key not in there]
    if missing:
        record.repair(path)
    one = functools.partial(_one, data_dir=data_dir, path=path)
    if jobs == 1 or len(missing) < 2:
        for key in missing:
            one(key)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        list(pool.map(one, missing))


@functools.lru_cache(maxsize=2)
def _work(task: str, data_dir: Path) -> Work:
    return prepare(TASKS[task], data_dir)


def _one(key: record.Key, *, data_dir: Path, path: Path) -> None:
    torch.set_num_threads(1)
    task, method, seed = key
    found = train(TASKS[task], _work(task, data_dir), METHODS[method], seed)
    about = {"task": task, "contender": method, "seed": seed, "residuals": "bfloat16"}  # float32 where it is not said
    record.append(path, {**about, **found})
    print(f"{task}, {shown(method)}, seed {seed}: {found['score']:.2f} % at {found['all_bits']:.3f} bits", flush=True)
