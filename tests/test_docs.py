"""The documentation: links lead somewhere, the site has every page and name, examples run, figures are copied right."""

import argparse
import ast
import configparser
import importlib
import inspect
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import hvd_dyncomp
from hvd_dyncomp.commands.report.runs import read_run
from hvd_dyncomp.commands.run import command
from hvd_dyncomp.exchange.coding import SMALL_BITS
from hvd_dyncomp.sessions.agreement import AVERAGER, COMPRESS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
SITE = yaml.safe_load((DOCS / "site" / "mkdocs.yml").read_text(encoding="utf-8"))


def prose(page: Path) -> str:
    """Without fenced and indented code, and without code in the middle of a line."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`]*`", "", re.sub(r"^    .*$", "", text, flags=re.MULTILINE))


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """Where the links of a page lead that stay in the repository: file and anchor, which may be empty."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if not re.match(r"[a-z]+:", target):
            path, _, anchor = target.partition("#")
            yield ((page.parent / path).resolve() if path else page), anchor


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them; docs/site/hooks.py has the site make the same."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for path, anchor in links(page):
        assert path.is_file(), f"{page.name} links to {path}, which is no file"
        assert path == page or path.is_relative_to(DOCS), f"{page.name} links to {path}, which the site does not have"
        assert not anchor or anchor in anchors(path), f"{page.name} links to {path.name}#{anchor}, which is no heading"


def named(navigation: object) -> Iterator[str]:
    if isinstance(navigation, str):
        yield navigation
    else:
        for part in navigation.values() if isinstance(navigation, dict) else navigation:
            yield from named(part)


def test_the_site_has_every_page_once() -> None:
    pages = [str(path.relative_to(DOCS)) for folder in (DOCS, DOCS / "tables") for path in folder.glob("*.md")]
    assert sorted(named(SITE["nav"])) == sorted([*pages, "index.md"])


API = (DOCS / "api.md").read_text(encoding="utf-8")


def test_every_public_name_has_an_entry_in_the_api() -> None:
    entries = re.findall(r"^### `(\w+)`$", API, flags=re.MULTILINE)
    assert sorted(entries) == sorted(hvd_dyncomp.__all__)


def documented(name: str) -> object:
    """What a heading of the API page is about."""
    found: object = hvd_dyncomp
    path = "hvd_dyncomp"
    for part in name.replace("quantizer.", "sessions.session.Session.").split("."):
        path += f".{part}"
        if not hasattr(found, part):
            importlib.import_module(path)
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("name", re.findall(r"^###+ `([\w.]+)`$", API, flags=re.MULTILINE))
def test_the_api_says_what_the_docstrings_say(name: str) -> None:
    """Each line, and each argument; what a class has inherited is in its own entry or in that of its base."""
    if name.startswith("integrations."):
        pytest.importorskip(name.split(".")[1], exc_type=ImportError)
    found = documented(name)
    text = inspect.getdoc(found) if callable(found) or isinstance(found, property) else ""
    if isinstance(found, type) and not vars(found).get("__doc__"):
        text = ""
    page = re.sub(r"\[([^][]*)\]\([^)]*\)", r"\1", API)  # without links
    shown = {line.strip().removeprefix("- ") for line in page.splitlines()}
    ends = {line.partition(" – ")[2] for line in shown}
    for line in filter(None, map(str.strip, (text or "").splitlines())):
        said = line.removeprefix("- ")
        told = {said, said.partition(": ")[2]} - {""}
        assert told & (shown | ends) or re.fullmatch(r"(Args|Returns|Yields|Raises|Examples|Attributes):", said), line
    if inspect.isfunction(found):
        assert set(inspect.signature(found).parameters) - {"self", "cls"} <= set(re.findall(r"\w+", API)), name


def test_one_version_everywhere() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    newest = re.search(r"^## (\S+)$", (DOCS / "changelog.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert newest is not None
    assert citation["version"] == newest[1] == hvd_dyncomp.__version__


def fences(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def applied(diff: str) -> str:
    return "".join(line[1:] for line in diff.splitlines(keepends=True))


def test_readme_and_quickstart_begin_alike() -> None:
    assert fences(ROOT / "README.md", "diff") == fences(DOCS / "quickstart.md", "diff")


def test_the_readmes_lines_for_ddp_run(tmp_path: Path) -> None:
    before = (
        "import torch\n"
        "from torch.nn.parallel import DistributedDataParallel\n"
        f"torch.distributed.init_process_group('gloo', init_method='file://{tmp_path}/store', rank=0, world_size=1)\n"
        "model = torch.nn.Linear(3, 3)\n"
    )
    after = "print(quantizer.bits)\ntorch.distributed.destroy_process_group()\n"
    assert run(before + applied(fences(ROOT / "README.md", "diff")[0]) + after, tmp_path) == "4\n"


def test_whole_programs_end_the_groups_that_they_start() -> None:
    """Without that, torch sometimes aborts a process at its end."""
    examples = [path.read_text(encoding="utf-8") for path in (DOCS / "examples").glob("*.py")]
    pages = [part for page in (ROOT / "README.md", *DOCS.glob("*.md")) for part in fences(page, "python")]
    starts = re.compile(r"^import torch\n.*^dist\.init_process_group\(", flags=re.DOTALL | re.MULTILINE)
    whole = [each for each in (*pages, *examples) if starts.search(each)]
    assert len(whole) >= 9
    assert [each for each in whole if not each.endswith("dist.destroy_process_group()\n")] == []


def rows(page: Path, name: str, table: str = "") -> list[list[str]]:
    """The cells of the rows of that name, after the name; only those below what begins with `table`."""
    text = page.read_text(encoding="utf-8")
    if table:
        text = text[text.index(table) :].partition("<!-- end of table -->")[0].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith(f"| {name} |")]
    return [[cell.strip() for cell in line.strip("|").split("|")][1:] for line in lines]


# A row of README.md's table; its page and table, what its methods are called there, and which table and column.
BENCHMARKS, STUDY = DOCS / "tables" / "benchmarks.md", DOCS / "study.md"
SHOWN = {
    "exchange of ResNet-50's gradients, DDP, 1 Gbit/s": (
        BENCHMARKS,
        "# The exchange alone: resnet50, 2 workers",
        ("DDP", "DDP fp16 hook", "ours, 4 bits, DDP"),
        (0, 1),
    ),
    "training step of ResNet-18, DDP, 1 Gbit/s": (
        DOCS / "benchmarks.md",
        "<!-- table resnet18, DDP:",
        ("DDP", "DDP fp16 hook", "ours, 4 bits, DDP"),
        (0, 1),
    ),
    "bits sent per gradient value": (
        BENCHMARKS,
        "# The exchange alone: resnet50, 2 workers",
        ("DDP", "DDP fp16 hook", "ours, 4 bits, DDP"),
        (1, 2),  # of times and bits, the latter; after the goal
    ),
    "accuracy, 1,500 steps of AdamW": (STUDY, "<!-- table recipe:", ("uncompressed", "fp16", "4, finer"), (0, 1)),
    "accuracy, 4,000 steps of AdamW": (
        STUDY,
        "<!-- table recipe, other tasks:",
        ("uncompressed", "", "4, finer"),
        (0, 1),
    ),
}


@pytest.mark.parametrize("name", SHOWN)
def test_the_figures_of_the_readme_are_those_of_benchmarks_and_study(name: str) -> None:
    page, table, methods, (number, column) = SHOWN[name]
    [cells] = rows(ROOT / "README.md", name)
    assert len(cells) == len(methods) == 3
    for cell, method in zip(cells, methods, strict=True):
        wanted = re.sub(r" (ms|%|points)$", "", cell)
        found = rows(page, method, table)[number][column].partition(" (")[0] if method else "not measured"
        assert wanted == found, method


def test_powersgd_in_the_readme_has_the_time_of_the_benchmarks() -> None:
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    said = re.search(r"PowerSGD hook of rank 1 exchanges the same gradients in (\d+) ms", text)
    found = rows(BENCHMARKS, "DDP PowerSGD r1", "# The exchange alone: resnet50, 2 workers")[0][1]
    assert said and said[1] == found.partition(" (")[0]


# The same for a row of comparison.md's table about PowerSGD.
OTHERS = ("DDP PowerSGD r1", "DDP PowerSGD r4", "ours, 4 bits, DDP", "ours, 0.25 bit, DDP")
OURS = ("PowerSGD rank 1", "PowerSGD rank 4", "4", "0.25")
EXCHANGE = "# The exchange alone: resnet50, 2 workers"
COMPARED = {
    "bits per value, ResNet-50": (BENCHMARKS, EXCHANGE, OTHERS, 1, 2),
    "exchange of ResNet-50 under DDP, 100 Mbit/s": (BENCHMARKS, EXCHANGE, OTHERS, 0, 0),
    "the same, 1 Gbit/s": (BENCHMARKS, EXCHANGE, OTHERS, 0, 1),
    "points, ResNet-8": (STUDY, "<!-- table tuned, resnet8:", OURS, 0, 3),
    "bits per value there": (STUDY, "<!-- table tuned, resnet8:", OURS, 0, 1),
    "points, clipped text, SGD": (STUDY, "<!-- table tuned, text, sgd, clipped:", OURS, 0, 3),
    "points, text, AdamW": (STUDY, "<!-- table tuned, text, adamw:", OURS, 0, 3),
    "points, text, 10 million values": (STUDY, "<!-- table tuned, 10 million:", ("", *OURS[1:]), 0, 3),
}


@pytest.mark.parametrize("name", COMPARED)
def test_the_figures_of_the_comparison_are_those_of_benchmarks_and_study(name: str) -> None:
    page, table, methods, number, column = COMPARED[name]
    [cells] = rows(DOCS / "comparison.md", name)
    assert len(cells) == len(methods)
    for cell, method in zip(cells, methods, strict=True):
        found = rows(page, method, table)[number][column].partition(" (")[0] if method else ""
        assert cell.removesuffix(" ms").replace(",", "") == found, method


def paper(name: str) -> list[list[str]]:
    return rows(DOCS / "tables" / "paper.md", name)


@pytest.mark.parametrize(
    ("said", "name"),
    [("constant 4 bits", "static 4"), ("dynamic 4-8-16", "dynamic 4-8-16"), ("dynamic 1-2-4", "dynamic 1-2-4")]
    + [("dynamic 16-8-4", "dynamic 16-8-4")],
)
def test_the_figures_about_the_paper_are_those_of_its_table(said: str, name: str) -> None:
    text = (DOCS / "paper.md").read_text(encoding="utf-8")
    line = next(line for line in text.splitlines() if re.match(rf"\| {said}(,[^|]*)? \|", line))
    points, share = [cell.strip() for cell in line.strip("|").split("|")][1:]
    in_all, against = paper(name)[:2]
    assert (points, share) == (against[0], against[1].partition(" ")[0])
    assert share == in_all[-2].partition(" ")[0]


def test_the_limits_of_the_readme_are_those_of_the_benchmarks() -> None:
    """Memory at 4 bits, and the most workers in anything that was timed."""
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    number = r"([\d.]+(?: to [\d.]+)?)"
    said = f"4 bits: {number} bytes per value with two workers.*?, {number} with three\\."
    [row] = rows(DOCS / "benchmarks.md", "ours, 4 bits", "<!-- table memory:")
    shown = [cell.replace("–", " to ") for cell in row[:2]]
    found = re.search(said, text)
    assert found and list(found.groups()) == shown
    assert "Nothing was timed with more than eight workers" in text
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in (DOCS / "data" / "bench").glob("*.json")]
    layouts = [one["layout"] for each in runs for one in each.get("seen", [])]
    workers = [each["workers"] for each in runs if "workers" in each]
    assert max(workers) == 8 and all(math.prod(map(int, each.split("x"))) <= 8 for each in layouts)


def test_the_readme_names_versions_and_commands_that_there_are() -> None:
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    versions = r"Python ([\d.]+) or newer, torch ([\d.]+) .*?pip accepts ([\d.]+) or newer.*? and Horovod ([\d.]+) if"
    said = re.search(versions, text)
    assert said and setup["options"]["python_requires"] == f">={said[1]}"
    assert f"\ntorch=={said[2]}." in (ROOT / "tools" / "requirements.in").read_text(encoding="utf-8")
    assert f"torch>={said[3]}" in setup["options"]["install_requires"].split()
    assert f"horovod=={said[4]} " in (ROOT / "tools" / "horovod.txt").read_text(encoding="utf-8")
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    for page in (ROOT / "README.md", *DOCS.glob("*.md")):
        commands = re.findall(r"(?:^    |`)make ([a-z-]+)", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
        assert set(commands) <= set(targets), page.name
    assert f"at {SMALL_BITS} bits or more" in text


def run(program: str, folder: Path) -> str:
    """What a program, alone and without a launcher, prints."""
    (folder / "program.py").write_text(program, encoding="utf-8")
    command = [sys.executable, "-P", "-W", "ignore", "program.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


# What the pages take for granted: the training script that a reader has already.
BEFORE = """
import json
import sys
from types import SimpleNamespace
import hvd_dyncomp
import torch
from hvd_dyncomp import CriticalRegime, Plateau, less_momentum
from torch.utils.tensorboard import SummaryWriter

model = torch.nn.Linear(40, 30)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
epochs, first_epoch, validation_shard, rank = 2, 0, range(10), 0
batches = [(torch.ones(3, 40), torch.arange(3)) for _ in range(4)]
logged = []
sys.modules["wandb"] = SimpleNamespace(init=lambda project: None, log=logged.append)

def train_one_epoch(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(3, 40)).square().mean().backward()
    optimizer.step()

def validate(model):
    return 0.85, 0.5
"""
AFTER = """
controller.step({"val_accuracy": 0.85, "train_loss": 0.5})
write_line(".", 4, controller, quantizer, train_loss=0.5)
from hvd_dyncomp.diagnostics import relative_errors
errors = relative_errors(quantizer, {name: p.grad for name, p in model.named_parameters()})
write_scalars(1, quantizer, errors, train_loss=0.5)
writer.close()
log_to_wandb(SimpleNamespace(controller=controller, meter=quantizer.meter), train_loss=0.5)
assert logged == [{"next_level": controller.bits, "bytes_sent": 0.0, "saved": 0.0, "train_loss": 0.5}], logged
"""


def test_the_examples_run(tmp_path: Path) -> None:
    """Of README, quickstart and how-to pages, in one script, in this order; a worker alone compresses nothing."""
    names = ("quickstart", "levels", "dynamic_levels", "training", "runs")
    # Whole programs, and what is for DDP, have tests of their own.
    others = re.compile(r"^# DDP$|hvd\.init\(\)|init_process_group", flags=re.MULTILINE)
    parts = [part for name in names for part in fences(DOCS / f"{name}.md", "python") if not others.search(part)]
    once_more = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)"  # one of the two is what a reader types
    readme = [applied(fences(ROOT / "README.md", "diff")[1]), once_more, *fences(ROOT / "README.md", "python")]
    wraps = [
        part.replace("# Horovod\n", f"{once_more}\n") if "DistributedOptimizer(" in part else part for part in parts
    ]
    examples = [*readme, *wraps]
    assert len(examples) > 8
    said = run("\n".join([BEFORE, *examples, AFTER]), tmp_path)
    assert said.splitlines()[0] == "0.0 0.0"  # bytes that left
    assert [epoch.number for epoch in read_run(tmp_path).epochs] == [0]
    assert list((tmp_path / "runs" / "mine").glob("events.*")) and (tmp_path / "quantizer.rank0.pt").is_file()


def test_the_policy_of_ones_own_runs(tmp_path: Path) -> None:
    after = "print(controller.bits, controller.policy.decide([None] * 45))\n"
    said = run(fences(DOCS / "dynamic_levels.md", "python")[-1] + after, tmp_path)
    assert said == "4 Decision(bits=16, reason='second half')\n"


def texts_of_the_package() -> Iterator[str]:
    """What it may say; … stands for what it puts in."""
    for path in (ROOT / "hvd_dyncomp").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
    for call in (COMPRESS, AVERAGER):
        yield f"the ranks {call.differs}"


def test_the_messages_of_the_page_about_trouble_are_the_packages() -> None:
    page = (DOCS / "trouble.md").read_text(encoding="utf-8")
    texts = "\n".join(re.sub(r"%[-\w.]*[srdgif]|\{[^}]*\}", "…", text) for text in texts_of_the_package())
    firsts = re.findall(r"^\| (`.*?) \|", page, flags=re.MULTILINE)
    messages = [message for first in firsts for message in re.findall(r"`([^`]+)`", first)]
    assert len(messages) > 25
    for message in messages:
        for part in message.split("…"):
            assert part.strip(" :,;.") in texts, message


def test_the_flags_of_the_run_command_and_their_defaults() -> None:
    page = (DOCS / "runs.md").read_text(encoding="utf-8")
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    offered = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    flags = {flag for action in offered for flag in action.option_strings} - {"-h", "--help"}
    shown = dict(re.findall(r"^\| `(--?\w+)[^`]*` \| (.*) \|$", page, flags=re.MULTILINE))
    assert set(shown) == flags
    assert shown["--level"].endswith(f"default {parser.get_default('level')}")
    assert shown["--steps"].endswith(f"default {command.STEPS}")
