"""On which device a rank computes: by what torch and Horovod say, on machines that are made up."""

from types import SimpleNamespace

import horovod.torch as hvd
import pytest
import torch

from common import device
from common.errors import RunError
from hvd_dyncomp.transport.horovod import HorovodTransport

NO_CUDA = "Horovod was built without CUDA"


@pytest.fixture
def machine(monkeypatch):
    """Makes up this rank's machine, and what other ranks find on theirs; returns where a wish leads to."""

    def look(wish: str, *, gpus: str = "A", built: bool = True, nccl: bool = False, rank: int = 0, others: tuple = ()):
        current, streams = [], []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(gpus))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid=gpus[number]))
        monkeypatch.setattr(torch.cuda, "set_device", current.append)
        monkeypatch.setattr(torch.cuda, "Stream", lambda where: f"a stream of {where}")
        monkeypatch.setattr(torch.cuda, "set_stream", streams.append)
        monkeypatch.setattr(hvd, "rank", lambda: rank)
        monkeypatch.setattr(hvd, "nccl_built", lambda: int(nccl))
        monkeypatch.setattr(HorovodTransport, "unsupported_reason", lambda self, where: "" if built else NO_CUDA)
        everyone = [["", list(seen)] if seen in ("A", "AB", "CD") else [seen, []] for seen in others]
        monkeypatch.setattr(device, "gather_json", lambda _, mine, name: [*everyone[:rank], mine, *everyone[rank:]])
        chosen = device.choose(wish)
        assert current == ([chosen] if chosen.type == "cuda" else [])
        assert streams == [f"a stream of {where}" for where in current]
        return str(chosen)

    return look


def test_each_worker_of_a_machine_has_a_gpu_as_far_as_there_are(machine) -> None:
    places = [machine("auto", gpus="AB", rank=rank, others=("AB", "AB")) for rank in range(3)]
    assert places == ["cuda:0", "cuda:1", "cuda:0"]
    places = [machine("auto", gpus="CD", rank=rank, others=("AB", "AB", "CD")[:3]) for rank in (2, 3)]
    assert places == ["cuda:0", "cuda:1"]  # on the second machine
    assert machine("cuda") == "cuda:0" and machine("cpu") == "cpu"


@pytest.mark.parametrize(
    ("found", "why"),
    [({"gpus": ""}, "torch sees no GPU"), ({"built": False}, NO_CUDA), ({"others": ("torch sees no GPU",)}, "no GPU")],
)
def test_all_ranks_or_none_compute_on_gpus(machine, found: dict, why: str) -> None:
    assert machine("auto", **found) == "cpu"
    with pytest.raises(RunError, match=f"--device cuda: .*{why}"):
        machine("cuda", **found)


def test_nccl_wants_a_gpu_for_each_worker(machine) -> None:
    assert machine("cuda", gpus="AB", nccl=True, others=("AB",)) == "cuda:0"
    assert machine("cuda", others=("A",)) == "cuda:0"  # through host memory
    with pytest.raises(RunError, match="2 workers would share 1 GPU, .* HOROVOD_GPU=CUDA"):
        machine("cuda", nccl=True, others=("A",))
    assert machine("auto", nccl=True, others=("A",)) == "cpu"


def test_torchruns_workers_may_share_a_gpu(machine, monkeypatch) -> None:
    """They are told so, and NCCL is not asked then, unless all ranks' takes that."""
    monkeypatch.setattr(device.ranks, "under_torchrun", lambda: True)
    monkeypatch.setattr(device.ranks, "transport", lambda: HorovodTransport())
    assert machine("cuda", nccl=True, others=("A",)) == "cuda:0"
    cases = [("A", True, False, True), ("B", True, False, False), ("A", True, True, False), ("A", False, True, True)]
    for gpu, ours, theirs, refused in cases:
        monkeypatch.setattr(device, "nccl_shares_gpus", lambda ours=ours: ours)
        monkeypatch.setattr(device, "gather_json", lambda _, mine, name, other=(gpu, theirs): [mine, [*other]])
        assert device.nccl_refuses(torch.device("cuda:0")) is refused
    assert not device.nccl_refuses(torch.device("cpu"))


@pytest.mark.parametrize(
    ("setting", "version", "shares"),
    [("1", 23007, True), ("1", 23000, True), ("1", 22809, False), ("0", 23007, False), ("", 23007, False)],
)
def test_nccl_shares_gpus_from_2_30_on_if_told_to(setting, version, shares, machine, monkeypatch) -> None:
    """Horovod's, too."""
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", setting)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(device, "_nccl_version", lambda: version)
    assert device.nccl_shares_gpus() is shares
    assert machine("auto", nccl=True, others=("A",)) == ("cuda:0" if shares else "cpu")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert not device.nccl_shares_gpus()


def test_nccls_version_is_that_of_the_library_that_is_loaded(monkeypatch) -> None:
    class Library:
        def ncclGetVersion(self, found) -> None:
            found._obj.value = 23007

    monkeypatch.setattr(device.ctypes, "CDLL", lambda name: Library())
    assert device._nccl_version() == 23007

    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(device.ctypes, "CDLL", missing)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9, "a"))
    assert device._nccl_version() == 22809
