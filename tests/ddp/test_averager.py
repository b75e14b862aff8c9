"""The examples of docs/training.md, checkpoints.md and averager.md run as they stand there; docs/examples trains."""

import re
from pathlib import Path

import pytest
from torchrun import run_program

DOCS = Path(__file__).parents[2] / "docs"
SECONDS = 120


def fences(page: str) -> list[str]:
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def share_of(program: str, folder: Path) -> float:
    """What two ranks of a program have sent, as a part of the bytes of float32."""
    (folder / "train.py").write_text(program, encoding="utf-8")
    done = run_program(2, folder / "train.py")
    assert done.returncode == 0, done.stdout
    [share] = re.findall(r"^(0\.\d+) of the bytes of float32$", done.stdout, re.MULTILINE)
    return float(share)


def test_the_example(tmp_path: Path) -> None:
    [example] = fences("averager.md")
    assert share_of(example, tmp_path) < 0.2


def test_the_whole_program_for_ddp() -> None:
    """It is on the page as it is in the file, learns, and prints what the page shows."""
    example = DOCS / "examples" / "train_ddp.py"
    assert fences("training.md")[1] == example.read_text(encoding="utf-8")
    done = run_program(2, example)
    assert done.returncode == 0, done.stdout
    losses = re.findall(r"^epoch (\d): validation loss (\S+), accuracy (\S+)$", done.stdout, re.MULTILINE)
    assert [int(epoch) for epoch, *_ in losses] == [0, 1, 2, 3, 4], done.stdout
    assert float(losses[-1][1]) < 0.4 and float(losses[-1][2]) > 0.88
    [said] = re.findall(r"^rank 0 sent \S+ MB instead of \S+ MB: (\S+)% saved$", done.stdout, re.MULTILINE)
    assert f"    {re.findall(r'^rank 0 sent.*$', done.stdout, re.MULTILINE)[0]}\n" in (DOCS / "training.md").read_text()
    assert 85 < float(said) < 88


# What the page takes for granted.
BEFORE = """
import os
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hvd_dyncomp

os.chdir(os.path.dirname(__file__))
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = torch.nn.Linear(40, 100)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = [(torch.randn(8, 40), torch.randint(100, (8,))) for _ in range(4)]
torch.amp.GradScaler = partial(torch.amp.GradScaler, "cpu")
"""
AFTER = """
quantizer.check_replicas()
if rank == 0:
    sent = quantizer.meter.total()
    print(f"{sent.sent_bytes / sent.float32_bytes:.3f} of the bytes of float32")
dist.destroy_process_group()
"""


@pytest.mark.thorough
def test_the_lines_for_ddp_and_checkpoints(tmp_path: Path) -> None:
    """All of the two pages that is no whole program, in one script."""
    lines = [each for page in ("training.md", "checkpoints.md") for each in fences(page)]
    parts = "\n".join(each for each in lines if "init_process_group" not in each)
    read = "hvd_dyncomp.AllRanks(quantizer).load_state_dict("
    assert parts.count("\n# DDP\n") >= 1 and parts.count(read) == 1
    assert share_of("\n".join([BEFORE, parts.replace(read, f"dist.barrier()\n{read}"), AFTER]), tmp_path) < 0.2
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == [
        "quantizer.pt",
        "quantizer.rank0.pt",
        "quantizer.rank1.pt",
    ]


def trained(program: str, modules: str, *arguments: str) -> tuple[str, float, dict[str, set[str]]]:
    """Trains on two ranks: the line that says what was learned, the share of bytes, and each module's checksums."""
    wrapper, path = Path(__file__).with_name("ends.py"), str(DOCS / "examples" / program)
    done = run_program(2, wrapper, path, modules, *arguments, seconds=SECONDS)
    assert done.returncode == 0, done.stdout
    checksum = re.compile(r"^(\w+) is (\w{64})$", re.MULTILINE)
    sums = checksum.findall(done.stdout)
    # The other rank may print its checksums between the two lines that rank 0 prints.
    lines = re.sub(r"\n+", "\n", checksum.sub("", done.stdout))
    [(learned, share)] = re.findall(r"^(.*)\n(0\.\d+) of the bytes of float32", lines, re.MULTILINE)
    assert len(sums) == 2 * len(modules.split(",")), done.stdout
    return learned, float(share), {name: {one for each, one in sums if each == name} for name, _ in sums}


def accuracy(learned: str) -> float:
    return float(learned.rpartition("accuracy ")[2])


# A rank that trains alone, on its half of the rows, comes to 0.74.
@pytest.mark.thorough
@pytest.mark.timeout(2 * SECONDS)
def test_a_plain_loop() -> None:
    learned, share, checksums = trained("loop_plain.py", "model", "8")
    assert len(checksums["model"]) == 1
    assert accuracy(learned) > 0.79
    assert 8 / 32 <= share <= 1.1 * 8 / 32


@pytest.mark.thorough
@pytest.mark.timeout(2 * SECONDS)
def test_local_steps() -> None:
    learned, share, checksums = trained("loop_local_steps.py", "shared,model")
    assert len(checksums["shared"]) == 1 and len(checksums["model"]) == 2, "steps are local, their mean is shared"
    assert accuracy(learned) > 0.79
    assert 4 / 32 / 8 <= share <= 1.1 * 4 / 32 / 8


@pytest.mark.thorough
@pytest.mark.timeout(2 * SECONDS)
def test_a_gan() -> None:
    """Real values are about -1 on one rank and about 1 on the other: a generator alone would make its rank's."""
    learned, share, checksums = trained("loop_gan.py", "generator,discriminator")
    assert [len(each) for each in checksums.values()] == [1, 1]
    found = re.match(r"made (\S+) \+- (\S+),", learned)
    assert found and abs(float(found[1])) < 0.5 and 1.1 < float(found[2]) < 1.8
    assert 4 / 32 <= share <= 1.15 * 4 / 32
