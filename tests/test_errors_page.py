"""docs/trouble.md has causes and remedies that do not fit into a message; all other messages help by themselves."""

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

SIMULATED = ("transport/in_process.py", "transport/rendezvous.py")  # ranks of tests
CHARTS = "report/"  # its constants and the texts that its functions return are parts of pages

EXCEPTIONS = {name for name, kind in vars(builtins).items() if isinstance(kind, type) and issubclass(kind, Exception)}

# A message helps if a clause of it begins with what to do, or if it says what must be and what is instead.
_DO = (
    "add|apply|attach|build|call|change|clip|compress|do it|export|give|install|keep|leave|load|make|pass|pip install|"
    "run|save|scale|unset|use|write"
)
REMEDY = re.compile(rf"(?:^|[;:,.(?] )(?:(?:and|or|so) )*(?:{_DO}) (?!must |works |of )", re.IGNORECASE)
CONTRAST = re.compile(r"\b(?:must|works? with|only)\b.* (?:got|but|missing)\b")

# The others that are not on the page, by the reason why they need not be.
EXPLAINED = {
    "the reason that follows is a message of its own": (
        "rank … called Controller.step with …",
        "rank … has no state: …",
        "the policy's config() failed on rank …: …",
        "the policy failed on rank 0 after epoch …: …",
        "the policy failed after epoch …",  # a log's, with the traceback
        "parameters on … cannot be sent: …",
        "…: rank … is missing from this step: …",
    ),
    "a part of a message that is on the page": (
        "where rank 0's has parameter …, rank …'s has …",
        "rank 0's has … parameters, rank …'s has …",
        "parameter … has other values on rank … than on rank 0",
        "none (there is no such parameter)",
        "the ranks' quantizers differ: …",
        "load_state_dict was called in the middle of it",
        "they are for NVIDIA GPUs, and this torch is built for AMD GPUs (ROCm)",
        "Triton … is older than 3.4, the oldest version that these kernels were compiled with",
        "Triton cannot build the launcher of a kernel: …",
    ),
    "a part of one that helps": (
        "messages are sent from CPUs and from CUDA devices only",
        "it belongs to other parameters than the model has now",
        'it was saved with allocation="error", which no longer exists',
        "controller.step({…: ...})",
    ),
    "there is nothing to do": (
        "AllRanks: the state is of … ranks with other shards of the parameters than those of the … ranks now; "
        "residuals are dropped, and begin at zero",
        "Controller.step: epoch … was stepped before; nothing changes",
        "DynamicQuantizer compresses only the gradients of an optimizer; a tensor of shape … from outside an optimizer "
        "travels uncompressed",
        "compress: one process trains this model, so there is nothing to compress",
        "… improved by less than … for … epochs",  # a decision's reason
    ),
    "a check of the package's own code": ("this rank does not take part in reducing this section",),
    "as Python's own": ("module … has no attribute …", "… takes no argument …"),
    "of python -m hvd_dyncomp.report: they name the file and the line": (
        "… is missing",
        "… is not the summary of a run",
        "… cannot be read: …",
        "…: error: … cannot be written: …",
        "…: line … is not a JSON object",
        "has a 'reason' that is not a string",
        "has epoch … after epoch …",
        "has no epoch number, a whole number from 0, under 'epoch'",
        "has no level above 0 and up to 64 bits per value under '…'",
    ),
}


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


def said_by_call(node: ast.Call, exceptions: set[str]) -> ast.expr | None:
    """What is said by an exception that is made, a warning, or an exit."""
    function, arguments = node.func, node.args
    if isinstance(function, ast.IfExp):  # one of two exceptions
        function = function.body
    name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
    if isinstance(function, ast.Name) and name in exceptions and arguments:
        return arguments[0]
    if isinstance(function, ast.Attribute) and name in ("warning", "error", "exception", "critical", "warn"):
        return arguments[0] if arguments else None
    if name == "exit" and len(arguments) == 2:
        return arguments[1]
    if name == "Timer" and isinstance(arguments[-1], ast.Tuple):  # a warning that comes later
        return arguments[-1].elts[0]
    return None


def said_by_others(node: ast.AST) -> Iterator[ast.expr]:
    """Constants, and what functions return: sentences, or parts of them, for somebody else to say."""
    if isinstance(node, ast.Assign) and re.fullmatch(r"_*[A-Z][A-Z_\d]*", getattr(node.targets[0], "id", "")):
        yield from node.value.values if isinstance(node.value, ast.Dict) else [node.value]
    elif isinstance(node, ast.FunctionDef) and node.name != "__repr__":
        returned = (inner.value for inner in ast.walk(node) if isinstance(inner, ast.Return))
        for value in filter(None, returned):
            yield from [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]


def said_in(module: str, tree: ast.Module, exceptions: set[str]) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (text := said_by_call(node, exceptions)):
            yield text
        elif isinstance(node, ast.Dict):  # what one rank tells the others, who raise it
            keys = [key.value if isinstance(key, ast.Constant) else None for key in node.keys]
            yield from (value for key, value in zip(keys, node.values, strict=True) if key == "error")
        elif not module.startswith(CHARTS):
            yield from said_by_others(node)


def letters(sentence: str) -> int:
    return sum(map(str.isalpha, sentence))


def said() -> set[str]:
    """All sentences of the package, and parts of them, but those of simulated ranks."""
    sources = sorted(PACKAGE.rglob("*.py"))
    trees = {str(path.relative_to(PACKAGE)): ast.parse(path.read_text(encoding="utf-8")) for path in sources}
    exceptions = EXCEPTIONS | own_exceptions(trees)
    texts = [
        words(text)
        for module, tree in trees.items()
        if module not in SIMULATED
        for text in said_in(module, tree, exceptions)
    ]
    return {text.strip() for text in texts if " " in text and letters(text) >= LEAST_LETTERS}


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


def helps(sentence: str) -> bool:
    """Whether one who reads the message alone knows what to do."""
    return bool(REMEDY.search(sentence) or CONTRAST.search(sentence))


SAID = said()
EXCUSED = [sentence for group in EXPLAINED.values() for sentence in group]


def test_sentences_are_found() -> None:
    assert len(SAID) > 100
    assert "DynamicQuantizer works with op=hvd.Average and op=hvd.Sum, got op=…" in SAID  # an exception
    assert "after epoch …: non-finite metrics …" in SAID  # a warning
    assert "the policy failed on rank 0 after epoch …: …" in SAID  # what another rank raises
    assert "messages are sent from CPUs and from CUDA devices only" in SAID  # part of another sentence
    assert "have all controllers seen the same epochs?" in SAID  # one of several


@pytest.mark.parametrize(
    ("sentence", "enough"),
    [
        ("levels must ascend, got …", True),
        ("attach must be called between steps, but gradients are in flight", True),
        ("the model was made on another device; call model.to(...) first", True),
        ("a step was left: did you load a state? Load it on every rank", True),
        ("the optimizer has been deleted", False),
        ("levels must ascend", False),
        ("rank … has … bytes, expected …", False),
        ("the call failed: … make of … is unknown", False),
        ("use of … has failed; compress works for one model", False),
    ],
)
def test_what_helps(sentence: str, enough: bool) -> None:
    assert helps(sentence) == enough


def test_every_message_helps_or_is_on_the_page() -> None:
    rows = listed()
    poor = [
        sentence
        for sentence in sorted(SAID)
        if not helps(sentence) and sentence not in EXCUSED and not any(begins(row, sentence) for row in rows)
    ]
    assert not poor, (
        "these say neither what to do nor what must be and what is; say it there, or in docs/trouble.md:\n"
        + "\n".join(poor)
    )


def test_every_row_is_of_a_sentence() -> None:
    stale = [row for row in listed() if not any(begins(row, sentence) for sentence in SAID)]
    assert not stale, "docs/trouble.md has what the package no longer says:\n" + "\n".join(stale)


def test_no_row_is_there_twice() -> None:
    rows = listed()
    assert len(rows) > 30
    assert sorted(set(rows)) == sorted(rows)


@pytest.mark.parametrize("sentence", EXCUSED)
def test_excuses_are_needed(sentence: str) -> None:
    assert sentence in SAID
    assert not helps(sentence)
    assert not any(begins(row, sentence) for row in listed())
