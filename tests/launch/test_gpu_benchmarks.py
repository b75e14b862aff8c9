"""Benchmarks on GPUs, without one: what is refused, where results go, what they say. And a run where there is one."""

import contextlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import horovod.torch as hvd
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench import __main__ as program
from bench import gpus, steps, tables, workloads
from bench.results import save
from common import launcher
from hvd_dyncomp.commands.probe import turns
from hvd_dyncomp.transport.horovod import HorovodTransport

BENCH = str(Path(__file__).parents[2] / "launch" / "bench")


@pytest.fixture
def two_gpus(monkeypatch):
    """Torch sees two GPUs; Horovod goes through host memory, unless `nccl` is called."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "a GPU")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(HorovodTransport, "unsupported_reason", lambda self, where: "")
    monkeypatch.setattr(hvd, "nccl_built", lambda: 0)
    return SimpleNamespace(nccl=lambda: monkeypatch.setattr(hvd, "nccl_built", lambda: 1))


@pytest.fixture
def started(monkeypatch):
    """What would have been started: workers' environments and specifications. Each has measured something."""
    seen = []

    def measure(spec, args, environment):
        seen.append(spec)
        for rate in spec["rates"]:
            found = {"values": 1, "tensors": 1, "contenders": {"none": {"ms": [1.0], "sent": []}}}
            save(Path(spec["folder"], f"{rate}.json"), found)
        return {}

    monkeypatch.setattr(steps, "_shared_memory", measure)
    monkeypatch.setattr(steps, "_over_links", measure)
    return seen


def bench(part: str, *flags: str) -> bool:
    return program.run(program.parse([part, *flags]))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("part", ["exchange", "hosts", "training", "kernels", "memory"])
def test_without_a_gpu_one_line_says_so(part, tmp_path, capsys, started):
    assert not bench(part, "--device", "cuda", "--output-dir", str(tmp_path))
    said = capsys.readouterr().err
    assert said == f"bench: error: {part}: --device cuda: torch sees no GPU\n"
    assert not started and not list(tmp_path.iterdir())


def about(path: Path) -> dict:
    [rate] = json.loads(path.read_text())["rates"].values()
    return rate["about"]


def test_figures_of_gpus_and_cpus_are_kept_apart(tmp_path, started, two_gpus):
    place = ("--model", "tiny", "--rates", "shm", "--output-dir", str(tmp_path))
    gpu = ("--device", "cuda")
    for choice in ((), gpu, ("--device", "auto"), (*gpu, "--launcher", "gloo"), (*gpu, "--launcher", "torchrun")):
        assert bench("exchange", *place, *choice)
    assert [spec["device"] for spec in started] == ["cpu", "cuda", "cuda", "cuda", "cuda"]
    ends = ["-cuda", "-gloo-cuda", "-torchrun-cuda", ""]
    names = [f"exchange-tiny-2{end}.json" for end in ends]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert [gpus.on_gpus(json.loads((tmp_path / name).read_text())) for name in names] == [True, True, True, False]
    found = [about(tmp_path / name) for name in names]
    assert ["gpus" in one for one in found] == [True, True, True, False]
    assert ["horovod" in one for one in found] == [True, True, False, False]


@pytest.mark.parametrize(("workers", "takes", "ddp"), [(2, False, "nccl"), (3, False, "gloo"), (3, True, "nccl")])
def test_ddp_goes_over_nccl_where_that_takes_so_many_workers(workers, takes, ddp, two_gpus, monkeypatch):
    monkeypatch.setattr(gpus, "nccl_shares_gpus", lambda: takes)
    assert gpus.found(workers, "torchrun") == {"gpus": ["a GPU"] * 2, "ddp": ddp}
    said = gpus.sentence(gpus.found(workers, "torchrun"), workers)
    assert ("shared by 3 workers" in said) == (workers == 3) and f"DDP over {ddp}" in said and "Horovod" not in said


@contextlib.contextmanager
def network(*args, **options):
    """Stands in for `hosts`."""

    def command(program, **options):
        return program

    yield SimpleNamespace(set_rate=lambda rate: None, addresses=["10.0.0.1"], command=command, counters=lambda: [0, 0])


def test_over_links_nccl_is_told_to_use_them(monkeypatch):
    """Or it would take InfiniBand, whatever the link is held to."""
    environments = []
    monkeypatch.setattr(steps, "hosts", network)
    monkeypatch.setattr(steps.link_rate, "measure", lambda lab, nbytes: 1e9)
    monkeypatch.setattr(steps, "start", lambda command, environment: environments.append(environment))
    args = program.parse(["exchange"])
    for where in ("cpu", "cuda"):
        steps._over_links({"rates": ["1gbit"], "device": where}, args, {})
    assert [environment.get("NCCL_SOCKET_IFNAME") for environment in environments] == [None, "eth0"]
    assert [environment.get("NCCL_SHM_DISABLE") for environment in environments] == [None, "1"]


def test_a_step_is_timed_from_an_idle_device_to_an_idle_device(monkeypatch):
    happened = []
    monkeypatch.setattr(turns.ranks, "barrier", lambda: happened.append("barrier"))
    monkeypatch.setattr(turns.time, "perf_counter", lambda: happened.append("clock") or 0.0)
    method = SimpleNamespace(step=lambda: happened.append("step"), finish=lambda: happened.append("finish"))
    turns.timed(method)
    assert happened == ["finish", "barrier", "clock", "step", "finish", "clock"]


class Devices(TorchDispatchMode):
    """Types of all devices whose tensors an operator takes or returns."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        returned = operator(*args, **(kwargs or {}))
        tensors = [one for one in tree_leaves((args, kwargs, returned)) if isinstance(one, torch.Tensor)]
        self.seen |= {tensor.device.type for tensor in tensors}
        return returned


@pytest.mark.parametrize("name", workloads.TRAINING_MODELS)
@pytest.mark.parametrize("make", [workloads.exchange, workloads.training])
def test_all_of_a_workload_is_on_its_device(make, name):
    model, loss = make(name, seed=0, device=torch.device("meta"))()
    with Devices() as devices:
        loss(model).backward()
    assert devices.seen == {"meta"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("methods", ["alone,none,4bit,ddp", "alone,ddp,4bit-ddp"])
def test_on_a_gpu_that_is_there(methods, tmp_path):
    place = ("--device", "cuda", "--rates", "shm", "--seconds", "0", "--rounds", "2", "--output-dir", str(tmp_path))
    command = [sys.executable, BENCH, "exchange", "--model", "tiny", *place]
    # Not by mpirun: where there is a GPU there may be no MPI.
    by = "gloo" if "none" in methods else "torchrun"
    ended = launcher.run([*command, "--launcher", by, "--methods", methods], timeout=240)
    if "and NCCL, which Horovod was built with" in ended.stdout:
        pytest.skip("there are fewer GPUs than workers, and Horovod goes through NCCL")
    assert ended.returncode == 0, ended.stdout
    results = json.loads((tmp_path / f"exchange-tiny-2-{by}-cuda.json").read_text())
    assert torch.cuda.get_device_name() in tables.caption(results)
