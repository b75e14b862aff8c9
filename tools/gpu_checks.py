"""What tools/on_gpu.py runs, by stage, how long that may take, and what the table says of it.

1  the kernels equal their specification bit for bit, and access no memory that is not theirs
2  their speed
3  two ranks: equal to CPUs, loops, level switches, GradScaler; the time of an exchange
4  training: what overlaps, and time to accuracy
5  memory; DistributedDataParallel
"""

from __future__ import annotations

import gzip
import json
import os
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bench import time_to_accuracy
from bench.results import load
from bench.tables import summaries
from common import launcher
from common.launcher import TRAINER

ROOT = Path(__file__).resolve().parents[1]
# Seconds: a call of a single stage, the build included, and all of them. A lent machine may be taken back after that.
BUILD, STAGE, ALL = 200, 540, 1500
STAGES = range(1, 6)
LINKS = "links of 1 Gbit/s"
PROFILE = Path("profiled", "profile.json.gz")  # among the results
_PYTHON = (sys.executable, "-P")  # the installed package, not the source tree
_PYTEST = (*_PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider")
_BENCH = (sys.executable, str(ROOT / "launch" / "bench"))
_MOST_PROCESSES = 16  # each takes some of the GPU's memory


@dataclass(frozen=True)
class Check:
    """A program to run: the stage that it belongs to, its name in the table, its limit in seconds.

    `read` returns what the table says, from what it printed and the files that it wrote; a program that ended with
    another status than 0 has failed all the same. Where the program that it `needs` is missing, or one that `may_fail`
    does, the machine has not got something, and that is no failure.
    """

    stage: int
    name: str
    command: Sequence[str]
    seconds: float
    read: Callable[[str], str]
    goal: str = ""
    needs: str = ""
    may_fail: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    fresh: Path | None = None  # a folder that must not be there


class Checks:
    """All that there is to run.

    Args:
        results: folder for the files of benchmarks.
        data: folder of the images to train with; empty: scikit-learn's digits.
        links: whether hosts can be made here whose link has a rate, as root can on most machines.
        pretend: on CPUs, with small sizes and Triton's interpreter.
    """

    def __init__(self, results: Path, data: Path, *, links: bool, pretend: bool) -> None:
        self._results, self._pretend = results, pretend
        self._device, self._suffix = ("cpu", "") if pretend else ("cuda", "-cuda")
        found = any(data.glob("*.gz"))
        self._images = ("--dataset", "fashion-mnist", "--data-dir", str(data)) if found else ("--dataset", "digits")
        self._links, self._rate = links, "1gbit" if links else "shm"
        self._profiled = results / PROFILE.parent

    def all(self) -> list[Check]:
        """In the order in which they are to run: what is worth most comes first."""
        return [*self._kernels(), self._speed(), *self._ranks(), *self._training(), self._memory(), self._ddp()]

    def _sizes(self, real: str, pretended: str) -> list[str]:
        return (pretended if self._pretend else real).split()

    def _bench(self, part: str, *flags: str) -> tuple[str, ...]:
        own = ("--device", self._device, "--output-dir", str(self._results))
        return (*_BENCH, part, *own, *flags)

    def _file(self, name: str) -> dict[str, Any]:
        path = self._results / f"{name}{self._suffix}.json"
        if not path.exists():
            raise FileNotFoundError(f"{path.name} was not written")
        return load(path)

    def _kernels(self) -> Iterator[Check]:
        tests = ("tests/kernels/test_triton.py", "tests/exchange/test_streams.py")
        at_once = ("-n", str(min(_MOST_PROCESSES, os.cpu_count() or 1)))
        few = ("-k", "test_encode or many_versions or each_part") if self._pretend else ()
        yield Check(1, "kernels equal the reference", (*_PYTEST, *at_once, *few, *tests), 230, passed, "all pass")
        for tool in "memcheck", "racecheck":
            command = ("compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *_PYTHON, "tests/kernels/calls.py")
            # With torch's own allocator, an access beyond a tensor would be one within its pool.
            alone = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
            yield Check(1, tool, command, 55, summary, "0", needs="compute-sanitizer", environment=alone)

    def _speed(self) -> Check:
        few = self._sizes("", f"--values {2**20} --rounds 1")
        goal = "encode, decode >= .70 of a copy, >= 10 x torch"
        return Check(2, "speed of kernels", self._bench("kernels", *few), 130, self._say_speed, goal)

    def _say_speed(self, said: str) -> str:
        found = self._file("kernels")
        if self._pretend:
            return f"{len(found['nanoseconds'])} figures"
        rates = found["rates"]
        words = [f"{name} {rates[f'4 {name}'] / rates['copy']:.2f}" for name in ("encode", "decode", "reduce 2")]
        times = [f"{rates[f'4 {name}'] / rates[f'4 {name}*']:.0f}" for name in ("encode", "decode")]
        return f"4 bits, of a copy's {rates['copy'] / 1e12:.2f} TB/s: {', '.join(words)}; {' and '.join(times)} x torch"

    def _ranks(self) -> Iterator[Check]:
        few = ("-k", "devices") if self._pretend else ()
        device = {"HVD_DYNCOMP_TEST_DEVICE": self._device}
        command = (*_PYTEST, *few, "tests/on_horovod/test_on_gpus.py")
        yield Check(3, "two ranks do as CPUs do", command, 180, passed, "all pass", environment=device)
        sizes = self._sizes(
            "--seconds 25 --methods alone,none,fp16,0.25bit,1bit,4bit,8bit,ddp,ddp-fp16,powersgd1,0.25bit-ddp,4bit-ddp",
            "--seconds 1 --methods none,fp16,4bit --model tiny",
        )
        probe = (sys.executable, str(ROOT / "launch" / "netlab"), "--launcher", "gloo", "--rate", "1gbit", "--", "true")
        yield Check(3, LINKS, probe, 10, last_line, may_fail=True)
        for rate, goal in [("shm", ""), ("1gbit", "4bit < fp16")][: 1 + self._links]:
            command = self._bench("exchange", "--launcher", "gloo", "--rounds", "15", "--rates", rate, *sizes)
            yield Check(3, f"exchange, {rate}", command, 75, partial(self._say_exchange, rate), goal)

    def _say_exchange(self, rate: str, said: str) -> str:
        found = summaries(self._file(f"exchange-{'tiny' if self._pretend else 'resnet50'}-2-gloo"))[rate]
        wanted = ("alone", "none", "fp16", "0.25bit", "4bit", "powersgd1", "0.25bit-ddp", "4bit-ddp")
        names = [name for name in wanted if name in found]
        return "ms: " + ", ".join(f"{name} {found[name].median:.1f}" for name in names)

    def _training(self) -> Iterator[Check]:
        model = "resnet8" if self._pretend else "resnet18"
        sizes = self._sizes("--limit-train 8000 --batch-size 64", "--limit-train 600 --batch-size 16")
        program = [str(TRAINER), *self._images, "--model", model, "--epochs", "1", *sizes, "--device", self._device]
        program += ["--compression", "static", "--bits", "4", "--profile", "--output-dir", str(self._profiled)]
        command = launcher.horovodrun(2, program, "--gloo")
        yield Check(4, "what overlaps, 4 bits", command, 60, self._say_overlap, fresh=self._profiled)
        sizes = self._sizes(
            "--epochs 4 --limit-train 16000 --batch-size 64 --lr 0.05", "--epochs 1 --limit-train 600 --tolerance 20"
        )
        place = ("--launcher", "gloo", "--rate", self._rate, "--methods", "none,fp16,4bit")
        trained = self._bench("accuracy", *self._images, "--model", model, *place, *sizes)
        say = partial(self._say_accuracy, model)
        yield Check(4, f"time to accuracy, {self._rate}", trained, 220, say, "least at 4 bits")

    def _say_overlap(self, said: str) -> str:
        return overlap(self._results / PROFILE)

    def _say_accuracy(self, model: str, said: str) -> str:
        found = self._file(f"accuracy-{model}-{self._rate}-gloo")
        goal = time_to_accuracy.target(found)
        when = {name: time_to_accuracy.reached(run, goal) for name, run in found["runs"].items()}
        words = (f"{name} {'not reached' if s is None else f'{s:.1f}'}" for name, s in when.items())
        return f"s to {100 * goal:.1f} %: " + ", ".join(words)

    def _memory(self) -> Check:
        few = self._sizes("--layouts 2,3 --methods fp16,0.25bit,4bit", "--layouts 2 --values 4000000 --methods 4bit")
        command = self._bench("memory", "--launcher", "gloo", *few)
        return Check(5, "memory, bytes a value", command, 90, self._say_memory, "4 bits <= 3.5, 4.5")

    def _ddp(self) -> Check:
        command = (*_PYTEST, "tests/ddp/test_ddp_on_gpus.py", "tests/fsdp/test_fsdp_on_gpus.py")
        environment = {"HVD_DYNCOMP_TEST_DEVICE": self._device}
        return Check(5, "DDP and FSDP do as on CPUs", command, 120, passed, "all pass", environment=environment)

    def _say_memory(self, said: str) -> str:
        found = self._file("memory-gloo")
        kind = "host" if self._pretend else "gpu"
        words = []
        for layout, one in found["layouts"].items():
            each = {name: max(rank[kind] for rank in ranks) for name, ranks in one["contenders"].items()}
            shown = ", ".join(f"{name} {most / found['values']:.1f}" for name, most in each.items())
            words.append(f"{layout} workers: {shown}")
        return "; ".join(words)


def passed(said: str) -> str:
    """What pytest says of its tests, without its time."""
    return _last(r"\d+ (?:passed|failed|skipped|error).*", said).partition(" in ")[0]


def summary(said: str) -> str:
    """What compute-sanitizer says at its end."""
    return _last(r"[A-Z]+ SUMMARY: (.*)", said)


def last_line(said: str) -> str:
    """Of a table, its last row."""
    return " ".join(said.strip().split("\n")[-1].replace("|", " ").split())


def _last(pattern: str, said: str) -> str:
    found = re.findall(pattern, said)
    return found[-1].strip() if found else f"nothing like {pattern!r} was said"


def overlap(trace: Path) -> str:
    """Of a profile of rank 0: what of the exchange is encoded within backward, and how long is waited after it."""
    with gzip.open(trace) as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]

    def named(name: str) -> list[dict[str, Any]]:
        return [event for event in events if event["name"] == name and event.get("cat") == "user_annotation"]

    backward = [(event["ts"], event["ts"] + event["dur"]) for event in named("backward")]
    encoded = named("hvd_dyncomp.encode")
    within = [one for one in encoded if any(begin <= one["ts"] < end for begin, end in backward)]
    waits = statistics.median(event["dur"] / 1e3 for event in named("synchronize"))
    computing = statistics.median((end - begin) / 1e3 for begin, end in backward)
    return (
        f"{len(within)} of {len(encoded)} buckets encoded within backward of {computing:.1f} ms (host's view); "
        f"then {waits:.1f} ms of waiting"
    )
