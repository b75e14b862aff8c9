"""On which device a rank trains: by what torch and Horovod say, on machines that are made up."""

import pytest
import torch

from common.errors import RunError
from training import device

NO_CUDA = "Horovod was built without CUDA"


@pytest.fixture
def machine(monkeypatch):
    """Makes up this rank's machine, and what other ranks find on theirs; returns where a wish leads to."""

    def look(wish: str, *, gpus: int = 1, built: bool = True, local_rank: int = 0, others: tuple[str, ...] = ()):
        current, streams = [], []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "set_device", current.append)
        monkeypatch.setattr(torch.cuda, "Stream", lambda where: f"a stream of {where}")
        monkeypatch.setattr(torch.cuda, "set_stream", streams.append)
        monkeypatch.setattr(device.hvd, "local_rank", lambda: local_rank)
        monkeypatch.setattr(device.HorovodTransport, "obstacle", lambda self, where: "" if built else NO_CUDA)
        monkeypatch.setattr(device, "gather_json", lambda value, name: [value, *others])
        chosen = device.choose(wish)
        assert current == ([chosen] if chosen.type == "cuda" else [])
        assert streams == [f"a stream of {where}" for where in current]
        return str(chosen)

    return look


def test_each_worker_of_a_machine_has_a_gpu_as_far_as_there_are(machine) -> None:
    assert [machine("auto", gpus=2, local_rank=rank) for rank in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert machine("cuda") == "cuda:0" and machine("cpu") == "cpu"


@pytest.mark.parametrize(
    ("found", "why"),
    [({"gpus": 0}, "torch sees no GPU"), ({"built": False}, NO_CUDA), ({"others": ("torch sees no GPU",)}, "no GPU")],
)
def test_all_ranks_or_none_train_on_gpus(machine, found: dict, why: str) -> None:
    assert machine("auto", **found) == "cpu"
    with pytest.raises(RunError, match=f"--device cuda: .*{why}"):
        machine("cuda", **found)


def test_batches_are_moved() -> None:
    batch = torch.ones(2, 1, 4, 4), torch.tensor([0, 1])
    [there] = device.moved([batch], torch.device("meta"))
    assert [tensor.device.type for tensor in there] == ["meta", "meta"]
    [here] = device.moved([batch], torch.device("cpu"))
    assert here[0] is batch[0] and here[1] is batch[1]
