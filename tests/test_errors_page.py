"""docs/trouble.md: every sentence that the package can say is there, and none that it no longer says."""

import ast
import builtins
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hvd_dyncomp"
PAGE = ROOT / "docs" / "trouble.md"

VALUE = "…"  # in place of what is known at run time only
LEAST_LETTERS = 8  # of a fixed part that can be recognised: "…: …" only wraps another sentence

# What the page sums up in its last paragraph: modules, and of which exceptions.
SIMULATED = ("transport/in_process.py", "transport/rendezvous.py")
SUMMED_UP = {"kernels/__init__.py": ("ValueError", "TypeError"), **dict.fromkeys(SIMULATED)}

# Functions that return sentences for somebody else to say, and constants that are such sentences or parts of them.
RETURNING = ("advice", "obstacle", "_about_mpi", "_about_streams", "_disagreement", "_difference")
CONSTANTS = (
    "JOINED",
    "ANOTHER_OPTIMIZER",
    "IN_FLIGHT",
    "CAPTURED",
    "INFERENCE",
    "NOT_ALL",
    "VERSION",
    "FORGOTTEN",
    "ASSIGNED",
    "REDUCED_AGAIN",
    "OVERWRITTEN",
    "THROWN_AWAY",
    "BEFORE_HOROVOD",
    "LITTLE_MOMENTUM",
    "NOT_MADE",
    "NO_ACCURACY",
    "NO_EVALUATION",
    "NOT_WRAPPED",
    "FSDP1",
    "FSDP2",
    "LATE",
    "HOOKED",
    "SAME_ORDER",
    "TWINS",
    "UNWRAPPED",
    "_HINTS",
)

EXCEPTIONS = {name for name, kind in vars(builtins).items() if isinstance(kind, type) and issubclass(kind, Exception)}


def words(node: ast.expr) -> str:
    """The text of a literal, with `VALUE` for what is put into it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[-.\d]*[sdrgf]|\{\}", VALUE, node.value)
    if isinstance(node, ast.JoinedStr):
        text = "".join(words(part) if isinstance(part, ast.Constant) else VALUE for part in node.values)
        return re.sub(f"{VALUE}+", VALUE, text)
    if isinstance(node, ast.BinOp):
        return words(node.left) + words(node.right)
    return VALUE


def own_exceptions(trees: dict[str, ast.Module]) -> set[str]:
    """Names of the package's own classes that derive from an exception."""
    found: set[str] = set()
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
                found |= {node.name} if bases & (EXCEPTIONS | found) else set()
    return found


def said_by_call(node: ast.Call, exceptions: set[str]) -> Iterator[tuple[str, str]]:
    """Who says it (an exception, or ""), and what, of an exception that is made, a warning, or an exit."""
    function, arguments = node.func, node.args
    if isinstance(function, ast.IfExp):  # one of two exceptions
        function = function.body
    name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
    if isinstance(function, ast.Name) and name in exceptions and arguments:
        yield name, words(arguments[0])
    elif isinstance(function, ast.Attribute) and name in ("warning", "error", "exception", "critical", "warn"):
        yield from (("", words(argument)) for argument in arguments[:1])
    elif name == "exit" and len(arguments) == 2:
        yield "", words(arguments[1])
    elif name == "Timer" and isinstance(arguments[-1], ast.Tuple):  # a warning that comes later
        yield "", words(arguments[-1].elts[0])


def said_in(tree: ast.Module, exceptions: set[str]) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from said_by_call(node, exceptions)
        elif isinstance(node, ast.Dict):  # what one rank tells the others, who raise it
            keys = [key.value if isinstance(key, ast.Constant) else None for key in node.keys]
            yield from (("", words(value)) for key, value in zip(keys, node.values, strict=True) if key == "error")
        elif isinstance(node, ast.FunctionDef) and node.name in RETURNING:
            for inner in ast.walk(node):
                if isinstance(inner, ast.Return) and inner.value is not None:
                    branches = [inner.value.body, inner.value.orelse] if isinstance(inner.value, ast.IfExp) else []
                    yield from (("", words(value)) for value in branches or [inner.value])
        elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") in CONSTANTS:
            values = node.value.values if isinstance(node.value, ast.Dict) else [node.value]
            yield from (("", words(value)) for value in values)


def letters(sentence: str) -> int:
    return sum(map(str.isalpha, sentence))


def said() -> set[str]:
    """All sentences of the package but those that the page sums up."""
    sources = sorted(PACKAGE.rglob("*.py"))
    trees = {str(path.relative_to(PACKAGE)): ast.parse(path.read_text(encoding="utf-8")) for path in sources}
    exceptions = EXCEPTIONS | own_exceptions(trees)
    found = set()
    for module, tree in trees.items():
        if module in SUMMED_UP and SUMMED_UP[module] is None:
            continue
        for kind, sentence in said_in(tree, exceptions):
            if kind not in (SUMMED_UP.get(module) or ()) and " " in sentence and letters(sentence) >= LEAST_LETTERS:
                found.add(sentence.strip())
    return found


def listed() -> list[str]:
    """The sentences in the first cells of the page's tables, or what they begin with."""
    cells = re.findall(r"^\| (`.+?`) \|", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return [row for cell in cells for row in re.findall(r"`([^`]+)`", cell)]


def begins(row: str, sentence: str) -> bool:
    """Whether a row is about a sentence: all of it, or what it begins with if it ends there with a word."""
    # A hint in brackets follows another sentence.
    sentence = sentence.lstrip("( ")
    return sentence == row or (
        sentence.startswith(row) and not row.endswith(VALUE) and not sentence[len(row)].isalpha()
    )


SAID = said()


def test_sentences_are_found() -> None:
    assert len(SAID) > 100
    assert "DynamicQuantizer works with op=hvd.Average and op=hvd.Sum, got op=…" in SAID  # an exception
    assert "after epoch …: non-finite metrics …" in SAID  # a warning
    assert "the policy failed on rank 0 after epoch …: …" in SAID  # what another rank raises
    assert "messages are sent from CPUs and from CUDA devices only" in SAID  # part of another sentence


def test_every_sentence_is_on_the_page() -> None:
    missing = [sentence for sentence in sorted(SAID) if not any(begins(row, sentence) for row in listed())]
    assert not missing, "docs/trouble.md lacks:\n" + "\n".join(missing)


def test_every_row_is_of_a_sentence() -> None:
    stale = [row for row in listed() if not any(begins(row, sentence) for sentence in SAID)]
    assert not stale, "docs/trouble.md has what the package no longer says:\n" + "\n".join(stale)


def test_no_row_is_there_twice() -> None:
    rows = listed()
    assert sorted(set(rows)) == sorted(rows)


@pytest.mark.parametrize("name", [*RETURNING, *CONSTANTS])
def test_names_still_exist(name: str) -> None:
    """A function or constant that is renamed would be searched for in vain."""
    sources = "".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    assert re.search(rf"^( *def {name}\(|{name}\b.* = )", sources, flags=re.MULTILINE)


def test_what_is_summed_up_is_named() -> None:
    *_, last = PAGE.read_text(encoding="utf-8").strip().split("\n\n")
    for module in SUMMED_UP:
        assert f"`hvd_dyncomp.{module.removesuffix('.py').removesuffix('/__init__').replace('/', '.')}`" in last
