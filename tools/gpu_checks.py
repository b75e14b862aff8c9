"""What tools/on_gpu.py runs, by stage, how long that may take, and what the table says of it.

A  two ranks over NCCL, on one GPU if there is only one: compressed models beside plain ones
B  training: loss curves, speed and memory beside plain DistributedDataParallel, and what overlaps
C  the time of an exchange: without a network, and over links of 1 and 10 Gbit/s
D  the kernels equal their specification bit for bit, and their speed
E  Horovod, which is built meanwhile; and whether a kernel accesses memory that is not its own
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
from pathlib import Path
from typing import Any

import torch
from torchrun import bodies

from bench.results import load
from bench.tables import summaries
from bench.tables import title as method

ROOT = Path(__file__).resolve().parents[1]
STAGES = "ABCDE"
ALL = 570  # seconds of a call: a lent machine may be taken back after a quarter of an hour
LINKS = "links with a rate"
PROFILE = "profile.json.gz"
_PYTHON = (sys.executable, "-P")  # the installed package, not the source tree
_PYTEST = (*_PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider")
_BENCH = (sys.executable, str(ROOT / "launch" / "bench"))
_SLOW = 4  # times as long may checks take that are pretended, on few cores
_MOST_PROCESSES = 16  # each takes some of the GPU's memory
_ON_RANKS = Path("tests/ddp/on_ranks")
Spans = list[tuple[float, float]]  # beginnings and ends
# A check for each, because what hangs ends only itself: its name, and which tests of test_nccl.py it is.
_OVER_NCCL = {
    "means at 32, 4 and 0.25 bits": "means",
    "resume bit for bit": "resume",
    "two models in one pass": "two_models",
    "find_unused_parameters": "find_unused",
    "an exception": "exception",
    "no_sync": "no_sync",
    "a bfloat16 model": "bfloat16",
    "autocast and GradScaler": "scaler",
    "a collective of the program's": "within_backward",
    "Averager": "averager",
}


@dataclass(frozen=True)
class Check:
    """A program to run: the stage that it belongs to, its name in the table, its limit in seconds.

    `read` returns what the table says, from what it printed and the files that it wrote; a program that ended with
    another status than 0 has failed all the same. Where there is a `lack`, or the program that it `needs` is missing,
    or one that `may_fail` does, the machine has not got something, and that is no failure.
    """

    stage: str
    name: str
    command: Sequence[str]
    seconds: float
    read: Callable[[str], str]
    goal: str = ""
    lack: str = ""
    needs: str = ""
    may_fail: bool = False
    environment: dict[str, str] = field(default_factory=dict)


class Checks:
    """All that there is to run.

    Args:
        results: folder for the files of benchmarks.
        backend: of ranks with GPUs: "nccl", or "gloo" where NCCL takes no ranks that share one.
        links: whether hosts can be made here whose link has a rate, as root can on most machines.
        built: a file that has the status of Horovod's build, once that has ended.
        pretend: on CPUs, with small sizes and Triton's interpreter; Gloo takes NCCL's place.
    """

    def __init__(self, results: Path, built: Path, *, backend: str, links: bool, pretend: bool) -> None:
        self._results, self._built, self._links, self._pretend = results, built, links, pretend
        self._device, self._suffix = ("cpu", "") if pretend else ("cuda", "-cuda")
        self._place = {
            "HVD_DYNCOMP_TEST_DEVICE": self._device,
            "HVD_DYNCOMP_TEST_BACKEND": "as-nccl" if pretend else backend,
        }

    def all(self) -> list[Check]:
        """In the order in which they are to run: what is worth most comes first."""
        parts = (self._training_checks, self._curves, self._exchanges, self._kernels, self._horovod)
        return [check for part in parts for check in part()]

    def _limit(self, seconds: float) -> float:
        return seconds * (_SLOW if self._pretend else 1)

    def _sizes(self, real: str, pretended: str) -> list[str]:
        return (pretended if self._pretend else real).split()

    def _bench(self, part: str, *flags: str) -> tuple[str, ...]:
        return (*_BENCH, part, "--device", self._device, "--output-dir", str(self._results), *flags)

    def _file(self, name: str) -> dict[str, Any]:
        path = self._results / f"{name}{self._suffix}.json"
        if not path.exists():
            raise FileNotFoundError(f"{path.name} was not written")
        return load(path)

    def _training_checks(self) -> Iterator[Check]:
        def on_ranks(name: str, ranks: int, file: Path, *options: str, seconds: float = 20, lack: str = "") -> Check:
            # The time to start counts, too: a check that hangs is ended by pytest, which says where it was.
            command = bodies([file], ranks, *options, seconds=self._limit(seconds - 5))
            goal, place = f"all pass on {ranks} ranks", self._place
            return Check("A", name, command, self._limit(seconds), passed, goal, lack, environment=place)

        for number, (name, tests) in enumerate(_OVER_NCCL.items()):
            # The first one compiles the kernels.
            yield on_ranks(name, 2, _ON_RANKS / "test_nccl.py", "-k", tests, seconds=20 if number else 60)
        command = (*_PYTEST, "tests/ddp/test_ddp_on_gpus.py", "-k", "killed")
        yield Check("A", "SIGKILL of one rank", command, self._limit(20), passed, "ends", environment=self._place)
        few = ("-k", "nccl_does or messages_and_sums") if self._pretend else ()
        yield on_ranks("a GPU does what a CPU does", 2, _ON_RANKS / "test_devices.py", *few, seconds=45)
        old = torch.torch_version.TorchVersion(torch.__version__) < "2.13"
        lack = f"FSDP2 of torch {torch.__version__} is another one" if old else ""
        file, tests = Path("tests/fsdp/on_ranks/test_exchange.py"), "gradients_become_means or bit_for_bit"
        yield on_ranks("FSDP2, 2 x 2 ranks", 4, file, "-k", tests, seconds=30, lack=lack)

    def _curves(self) -> Iterator[Check]:
        sizes = self._sizes("", "--steps 18 --batch-size 4")
        for model in self._sizes("resnet18 transformer-50m", "resnet8 tiny"):
            flags = ("--launcher", "torchrun", "--models", model, "--profile", *sizes)

            def say(said: str, model: str = model) -> str:
                return self._say_curves(model)

            yield Check("B", f"training, {model}", self._bench("curves", *flags), self._limit(50), say, "same curves")
        command = (*_PYTEST, "tests/ddp/test_ddp_on_gpus.py", "-k", "training")
        yield Check("B", "train_resnet.py", command, self._limit(40), passed, "trains", environment=self._place)

    def _say_curves(self, model: str) -> str:
        name = f"curves-{model}-2-torchrun"
        found = self._file(name)
        words = []
        for one, run in found["methods"].items():
            last = statistics.fmean(run["losses"][-10:])
            peak = "" if run["peak_bytes"] is None else f", {max(run['peak_bytes']) / 2**30:.2f} GiB"
            equal = "" if run["replicas_equal"] else ", REPLICAS DIFFER"
            words.append(f"{method(one)}: loss {last:.3f}, {run['steps_per_second']:.1f} steps/s{peak}{equal}")
        profiles = sorted(self._results.glob(f"{name}{self._suffix}-4bit*/{PROFILE}"))
        return "; ".join([*words, *map(overlap, profiles)])

    def _exchanges(self) -> Iterator[Check]:
        netlab = (sys.executable, str(ROOT / "launch" / "netlab"))
        probe = (*netlab, "--launcher", "torchrun", "--rate", "1gbit", "--", "true")
        yield Check("C", LINKS, probe, self._limit(10), last_line, may_fail=True)
        sizes = self._sizes(
            "--seconds 14 --methods ddp,ddp-fp16,ddp-bf16,powersgd1,powersgd4,0.25bit-ddp,4bit-ddp",
            "--seconds 1 --methods ddp,ddp-fp16,4bit-ddp --model tiny",
        )
        for rates, seconds in [("shm", 45), ("10gbit,1gbit", 65)][: 1 + self._links]:
            command = self._bench("exchange", "--launcher", "torchrun", "--rounds", "15", "--rates", rates, *sizes)

            def say(said: str, rates: str = rates) -> str:
                return self._say_exchange(rates)

            goal = "" if rates == "shm" else "4 bits < fp16"
            yield Check("C", f"exchange, {rates}", command, self._limit(seconds), say, goal)

    def _say_exchange(self, rates: str) -> str:
        found = summaries(self._file(f"exchange-{'tiny' if self._pretend else 'resnet50'}-2-torchrun"))
        return "; ".join(
            f"{rate}, ms: " + ", ".join(f"{method(name)} {one.median:.1f}" for name, one in found[rate].items())
            for rate in rates.split(",")
        )

    def _kernels(self) -> Iterator[Check]:
        at_once = ("-n", str(min(_MOST_PROCESSES, os.cpu_count() or 1)))
        few = ("-k", "test_encode or many_versions") if self._pretend else ()
        command = (*_PYTEST, *at_once, *few, "tests/kernels/test_triton.py")
        yield Check("D", "kernels equal the reference", command, self._limit(50), passed, "all pass")
        sizes = self._sizes("", f"--values {2**20} --rounds 1")
        goal = "encode, decode >= .70 of a copy, >= 10 x torch"
        yield Check("D", "speed of kernels", self._bench("kernels", *sizes), self._limit(35), self._say_speed, goal)

    def _say_speed(self, said: str) -> str:
        found = self._file("kernels")
        if self._pretend:
            return f"{len(found['nanoseconds'])} figures"
        rates = found["rates"]
        words = [f"{name} {rates[f'4 {name}'] / rates['copy']:.2f}" for name in ("encode", "decode", "reduce 2")]
        times = [f"{rates[f'4 {name}'] / rates[f'4 {name}*']:.0f}" for name in ("encode", "decode")]
        return f"4 bits, of a copy's {rates['copy'] / 1e12:.2f} TB/s: {', '.join(words)}; {' and '.join(times)} x torch"

    def _horovod(self) -> Iterator[Check]:
        wait = f"while [ ! -s {self._built} ]; do sleep 1; done; exit $(cat {self._built})"
        yield Check("E", "Horovod is built", ("sh", "-c", wait), self._limit(200), last_line)
        few = ("-k", "devices or each_part") if self._pretend else ()
        command = (*_PYTEST, *few, "tests/exchange/test_streams.py", "tests/on_horovod/test_on_gpus.py")
        place = {"HVD_DYNCOMP_TEST_DEVICE": self._device}
        yield Check("E", "two ranks do as CPUs do", command, self._limit(180), passed, "all pass", environment=place)
        for tool in "memcheck", "racecheck":
            line = ("compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *_PYTHON, "tests/kernels/calls.py")
            # With torch's own allocator, an access beyond a tensor would be one within its pool.
            alone = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
            yield Check("E", tool, line, 55, summary, "0", needs="compute-sanitizer", environment=alone)


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
    """Of a profile of rank 0: how long its host waits, and how much of NCCL's time passes beside other kernels."""
    with gzip.open(trace) as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]

    def spans(chosen: Callable[[dict[str, Any]], bool]) -> Spans:
        return [(event["ts"], event["ts"] + event["dur"]) for event in events if chosen(event)]

    encoded = spans(lambda event: event["name"] == "hvd_dyncomp.encode" and event.get("cat") == "user_annotation")
    waits = spans(lambda event: event["name"] == "hvd_dyncomp.catch_up" and event.get("cat") == "user_annotation")
    words = [f"{len(encoded)} buckets encoded"]
    if waits:
        words.append(f"{statistics.median(end - begin for begin, end in waits) / 1e3:.1f} ms of waiting a step")
    nccl = union(spans(lambda event: event.get("cat") == "kernel" and event["name"].startswith("nccl")))
    others = union(spans(lambda event: event.get("cat") == "kernel" and not event["name"].startswith("nccl")))
    if nccl:
        sent, both = length(nccl), length(intersection(nccl, others))
        words.append(f"NCCL {sent / 1e3:.1f} ms, {100 * both / sent:.0f} % of it beside other kernels")
    return ", ".join(words)


def union(spans: Spans) -> Spans:
    """Spans without overlaps, in order."""
    joined: Spans = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


def intersection(one: Spans, other: Spans) -> Spans:
    """What is in spans of both; neither has overlaps."""
    pairs = ((max(a[0], b[0]), min(a[1], b[1])) for a in one for b in other)
    return [(begin, end) for begin, end in pairs if begin < end]


def length(spans: Spans) -> float:
    return sum(end - begin for begin, end in spans)
