"""The documentation: links lead somewhere, the site has every page and name, examples run, figures are copied right."""

import argparse
import ast
import dataclasses
import importlib
import inspect
import json
import math
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml

import hvd_dyncomp
from hvd_dyncomp import __main__ as cli
from hvd_dyncomp.averaging import Averager
from hvd_dyncomp.commands.report.runs import read_run
from hvd_dyncomp.commands.run import command
from hvd_dyncomp.exchange.coding import SMALL_BITS
from hvd_dyncomp.exchange.settings import Settings
from hvd_dyncomp.sessions.agreement import AVERAGER, COMPRESS
from hvd_dyncomp.sessions.options import Options
from hvd_dyncomp.sessions.session import Session
from hvd_dyncomp.simulate import World

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
        sources = page.parent == DOCS / "api" and path.is_relative_to(ROOT / "hvd_dyncomp")  # hooks.py takes them along
        assert path == page or path.is_relative_to(DOCS) or sources, f"{page.name}: the site does not have {path}"
        assert not anchor or anchor in anchors(path), f"{page.name} links to {path.name}#{anchor}, which is no heading"


def named(navigation: object) -> Iterator[str]:
    if isinstance(navigation, str):
        yield navigation
    else:
        for part in navigation.values() if isinstance(navigation, dict) else navigation:
            yield from named(part)


def test_the_site_has_every_page_once() -> None:
    folders = (DOCS, DOCS / "api")  # those of not_in_nav are linked to
    pages = [str(path.relative_to(DOCS)) for folder in folders for path in folder.glob("*.md")]
    assert sorted(named(SITE["nav"])) == sorted([*pages, "index.md"])


API = {path.stem: path.read_text(encoding="utf-8") for path in (DOCS / "api").glob("*.md") if path.stem != "commands"}
ENTRIES = [
    (page, *found)
    for page, text in API.items()
    for found in re.findall(r"^##(#?) `([\w.]+)`\n(.*?)(?=^##|\Z)", text, flags=re.DOTALL | re.MULTILINE)
]
OPTIONS = "options: see `hvd_dyncomp.sessions.options.Options`."


def test_every_public_name_has_an_entry_in_the_api() -> None:
    entries = [name for _, member, name, _ in ENTRIES if not member and "." not in name]
    assert sorted(entries) == sorted(hvd_dyncomp.__all__)


def documented(name: str) -> object:
    """What a heading of the API is about."""
    found: object = hvd_dyncomp
    path = "hvd_dyncomp"
    for part in name.replace("quantizer.", "sessions.session.Session.").split("."):
        path += f".{part}"
        if not hasattr(found, part):
            importlib.import_module(path)
        found = getattr(found, part)
    return found


def lines_of(found: object) -> list[str]:
    """Of its docstring; what a class has inherited is in its own entry or in that of its base."""
    text = inspect.getdoc(found) if callable(found) or isinstance(found, property) else ""
    if isinstance(found, type) and not vars(found).get("__doc__"):
        text = ""
    return [line.strip() for line in (text or "").splitlines() if line.strip()]


def missing(lines: list[str], entry: str) -> list[str]:
    """Which of the lines of a docstring an entry does not show."""
    text = re.sub(r"\[([^][]*)\]\([^)]*\)", r"\1", entry)  # without links
    shown = {line.strip().removeprefix("- ") for line in text.splitlines()}
    ends = {line.partition(" – ")[2] for line in shown}
    lacking = []
    for line in lines:
        said = line.removeprefix("- ")
        told = {said, said.partition(": ")[2]} - {""}
        if not told & (shown | ends) and not re.fullmatch(r"(Args|Returns|Raises|Examples|Attributes):", said):
            lacking.append(line)
    return lacking


def skip_without_framework(name: str) -> None:
    if name.startswith("integrations."):
        pytest.importorskip(name.split(".")[1], exc_type=ImportError)


@pytest.mark.parametrize(("name", "entry"), [each[2:] for each in ENTRIES], ids=[each[2] for each in ENTRIES])
def test_the_api_says_what_the_docstrings_say(name: str, entry: str) -> None:
    """Each line; each argument with its default; base classes; and the link leads to the file that has the name."""
    skip_without_framework(name)
    found = documented(name)
    assert missing([line for line in lines_of(found) if line != OPTIONS], entry) == []
    if isinstance(found, type) and issubclass(found, Exception):
        assert f"Bases: `{found.__base__.__name__}`" in entry
    source = re.search(r"^Source: \[(.*)\]\(\.\./\.\./\1\)$", entry, flags=re.MULTILINE)
    if source and callable(found):
        text = (ROOT / source[1]).read_text(encoding="utf-8")
        assert re.search(rf"^(class|def) {found.__name__}\b", text, flags=re.MULTILINE)
    signature = entry.partition("```python\n")[2].partition("\n```")[0]
    if callable(found) and signature:
        for argument in inspect.signature(found).parameters.values():
            if argument.name not in ("self", "options"):
                default = "" if argument.default is argument.empty else f" = {argument.default!r}"
                default = default.replace("<factory>", "dict()")
                assert f"{argument.name}: {argument.annotation}{default}".replace("'", '"') in signature


TAKES_OPTIONS = ("ddp.compress", "fsdp.attach", "Averager", "DynamicQuantizer")
CALLBACKS = tuple(f"integrations.{name}.CompressionCallback" for name in ("transformers", "lightning"))


@pytest.mark.parametrize("name", [*TAKES_OPTIONS, *CALLBACKS])
def test_the_api_spells_out_the_options(name: str) -> None:
    [entry] = [text for _, _, each, text in ENTRIES if each == name]
    described = lines_of(Options)
    assert missing(described[described.index("Attributes:") :], entry) == []
    signature = entry.partition("```python\n")[2].partition("\n```")[0]
    for option in Options.__annotations__:
        assert re.search(rf"^    {option}: .* = {defaults()[option]},$", signature, flags=re.MULTILINE)
    skip_without_framework(name)
    assert OPTIONS in lines_of(documented(name))
    assert inspect.signature(documented(name)).parameters["options"].annotation == "Unpack[Options]"


def defaults() -> dict[str, object]:
    """Of all options, as the code has them."""
    settings = {field.name: field.default for field in dataclasses.fields(Settings)}
    parameters = inspect.signature(Session.__init__).parameters.values()
    rest = {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}
    return {**settings, **rest}


def test_the_options_are_those_of_the_code_with_their_defaults() -> None:
    text = " ".join(lines_of(Options))
    assert set(Options.__annotations__) == set(defaults())
    described = re.split(r" (?=(?:{}): )".format("|".join(Options.__annotations__)), text)[1:]
    said = {each.partition(":")[0]: re.findall(r"Default: (\w+)", each) for each in described}
    assert said == {name: [str(value)] for name, value in defaults().items()}


def test_the_api_names_the_keys_of_a_state() -> None:
    averagers = World(3).run(lambda transport: Averager([("a", torch.zeros(3000))], 4, transport=transport))
    state = averagers[0].state_dict()
    described = " ".join(lines_of(Session.state_dict)).partition("Returns: ")[2].partition("Raises:")[0]
    keys = re.findall(r'"(\w+)"', described)
    assert len(keys) == 6 and set(keys) <= set(state)
    assert state["residuals"]["a"].shape == (3000,) and state["residuals"]["a"].dtype == torch.bfloat16
    [shard] = state["shard_residuals"].values()
    assert shard["values"].dtype == torch.bfloat16 and shard["values"].numel() == pytest.approx(3000 / 3, rel=0.1)


def test_the_api_has_the_commands_and_their_flags() -> None:
    """And for each flag its help, word for word, and its default."""
    page = (DOCS / "api" / "commands.md").read_text(encoding="utf-8")
    [commands] = [each for each in cli.commands()._actions if isinstance(each, argparse._SubParsersAction)]
    entries = dict(re.findall(r"^## `(\w+)`\n(.*?)(?=^##|\Z)", page, flags=re.DOTALL | re.MULTILINE))
    assert list(entries) == list(commands.choices)
    for name, parser in commands.choices.items():
        assert parser.description in entries[name]
        shown = dict(re.findall(r"^- \*\*`(?:-h, )?([-\w]+).*?`\*\* – (.*)$", entries[name], flags=re.MULTILINE))
        offered = [each for each in parser._actions if each.help != argparse.SUPPRESS]
        assert list(shown) == [(each.option_strings or [each.metavar])[-1] for each in offered]
        for each, text in zip(offered, shown.values(), strict=True):
            assert text.startswith(parser._get_formatter()._expand_help(each))
            if each.default and each.nargs != 0 and each.option_strings:
                assert format(each.default, "g" if isinstance(each.default, float) else "") in text


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


# What README.md's columns are called in benchmarks.md, and where its links stand there.
BENCHMARKS, STUDY = DOCS / "tables" / "benchmarks.md", DOCS / "study.md"
STEPS = ("no exchange", "DDP", "DDP fp16 hook", "DDP PowerSGD r1", "ours, 4 bits, DDP", "ours, 0.25 bit, DDP")


@pytest.mark.parametrize(("link", "column"), [("100 Mbit/s", 0), ("1 Gbit/s", 1), ("10 Gbit/s", 2)])
def test_the_steps_of_the_readme_are_those_of_the_benchmarks(link: str, column: int) -> None:
    [cells] = rows(ROOT / "README.md", link)
    found = [rows(DOCS / "benchmarks.md", method, "<!-- table resnet18, DDP:")[0][column] for method in STEPS]
    assert cells == [each.partition(" (")[0] for each in found]
    if link == "1 Gbit/s":
        before, after, fp16 = (cells[number] for number in (1, 4, 2))
        words = f"drops from {before} to {after} ms (fp16 hook: {fp16} ms)"
        assert words in " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())


@pytest.mark.parametrize(
    ("name", "table", "runs"),
    [
        ("test loss after 1,500 steps, 6 runs", "<!-- table recipe:", 6),
        ("test loss after 4,000 steps, 3 runs", "<!-- table recipe, other tasks:", 3),
    ],
)
def test_the_losses_of_the_readme_are_those_of_the_study(name: str, table: str, runs: int) -> None:
    [cells] = rows(ROOT / "README.md", name)
    for cell, method in zip(cells, ("uncompressed", "4", "4, first 10% at 8"), strict=True):
        [found] = rows(STUDY, method, table)
        assert cell.removesuffix(" %") == found[1].partition(" (")[0], method
        assert f"×{runs}" in found[1] or found[3:] == [str(runs)], method
    if runs == 6:
        words = f"with {cells[1].removeprefix('+')} more loss"
        assert words in " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())


# The same for a row of comparison.md's table about PowerSGD.
OTHERS = ("DDP PowerSGD r1", "DDP PowerSGD r4", "ours, 4 bits, DDP", "ours, 0.25 bit, DDP")
EXCHANGE = "# The exchange alone: resnet50, 2 workers"
COMPARED = {
    "bits per value, ResNet-50": (BENCHMARKS, EXCHANGE, OTHERS, 1, 2),
    "exchange of ResNet-50 under DDP, 100 Mbit/s": (BENCHMARKS, EXCHANGE, OTHERS, 0, 0),
    "the same, 1 Gbit/s": (BENCHMARKS, EXCHANGE, OTHERS, 0, 1),
}


@pytest.mark.parametrize("name", COMPARED)
def test_the_times_of_the_comparison_are_those_of_the_benchmarks(name: str) -> None:
    page, table, methods, number, column = COMPARED[name]
    [cells] = rows(DOCS / "comparison.md", name)
    assert len(cells) == len(methods)
    for cell, method in zip(cells, methods, strict=True):
        found = rows(page, method, table)[number][column].partition(" (")[0]
        assert cell.removesuffix(" ms").replace(",", "") == found, method


# And of those about accuracy: the page and the table of best rates, and the column of 4 bits among those of momentum.
MOMENTUM = "<!-- table momentum:"
LOSSES = {
    "loss, ResNet-8": (STUDY, "<!-- table tuned, resnet8:", 4),
    "loss, clipped text, SGD": (DOCS / "tables" / "study.md", "<!-- table tuned, text, sgd, clipped:", 2),
    "loss, text, AdamW": (STUDY, "<!-- table tuned, text, adamw:", 3),
    "loss, text, 10 million values": (STUDY, "<!-- table tuned, 10 million:", None),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_losses_of_the_comparison_are_those_of_the_study(name: str) -> None:
    page, table, column = LOSSES[name]
    [[rank1, rank4, four, quarter]] = rows(DOCS / "comparison.md", name)
    for cell, method in ((rank1, "PowerSGD rank 1"), (rank4, "PowerSGD rank 4"), (quarter, "0.25, no momentum")):
        found = rows(page, method, table)
        assert cell == (found[0][3] if found else "not measured"), method
    assert four == (rows(STUDY, "4", MOMENTUM)[0][column].partition(" (")[0] if column else "not measured")


@pytest.mark.parametrize("name", ["levels", "study"])
def test_what_a_page_quotes_of_the_study_stands_in_its_tables(name: str) -> None:
    """A loss with its points and runs: in the row of one task, or in a cell of several."""
    text = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    quoted = re.findall(r"([+-][\d.]+ ± [\d.]+)\]?(?:\([^)]*\))? \(([+-][\d.]+); (\d+)\)", text)
    assert len(quoted) > 8
    tables = "".join((DOCS / page).read_text(encoding="utf-8") for page in ("study.md", "tables/study.md"))
    for loss, points, runs in quoted:
        assert f"| {loss} | {points} | {runs} |" in tables or f"| {loss} ({points}) ×{runs} |" in tables, loss


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
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    versions = r"Python ([\d.]+) or newer, torch ([\d.]+) .*?pip accepts ([\d.]+) or newer.*? and Horovod ([\d.]+) if"
    said = re.search(versions, text)
    assert said and project["requires-python"] == f">={said[1]}"
    assert f"\ntorch=={said[2]}." in (ROOT / "tools" / "requirements.in").read_text(encoding="utf-8")
    assert f"torch>={said[3]}" in project["dependencies"]
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
    names = ("quickstart", "levels", "dynamic_levels", "horovod", "training", "checkpoints", "runs")
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
