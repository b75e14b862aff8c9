"""What a tool thinks of: every small change of a file, by mutmut's operators and by some that it lacks.

Mutmut swaps operators, comparisons and constants, and drops arguments. What it lacks is what matters most here: calls,
conditions, `with` and `finally` that are not there. Its runner is not used: it leaves decorated functions as they are,
and imports the package once, before it forks.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import libcst as cst
import libcst.matchers as m
from libcst.metadata import MetadataWrapper, ParentNodeProvider, PositionProvider
from mutmut.mutation import mutators

# Whose changes no run can notice, or only as another text. Errors are changed as a whole.
_STRICT = m.Arg(keyword=m.Name("strict"))
_SILENT = (
    _STRICT
    | m.Annotation()
    | m.Decorator()
    | m.Import()
    | m.ImportFrom()
    | m.Assign([m.AssignTarget(m.Name("__all__"))])
    | m.Call(func=m.Name("cast") | m.Name("TypeVar") | m.Attribute(m.Name("logger")) | m.Attribute(m.Name("warnings")))
)
_FALSE, _TRUE = cst.Name("False"), cst.Name("True")


def _texts(node: cst.BaseString) -> Iterator[cst.CSTNode]:
    """Mutmut's first change of a string; none of what is said to people, which has a space."""
    if " " not in getattr(node, "value", " "):
        yield from list(mutators.operator_string(node))[:1]


def _arguments(node: cst.Call) -> Iterator[cst.CSTNode]:
    """Mutmut's, but for `strict`: it is there for mistakes that nobody makes now."""
    strict = [arg for arg in node.args if m.matches(arg, _STRICT)]
    yield from (call for call in mutators.operator_arg_removal(node) if all(arg in call.args for arg in strict))


def _gone(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Without a call, an error, or an assignment to something that was there before."""
    called = m.Expr(m.Call(func=~m.Attribute(m.Name("logger"))) | m.Yield())
    kept = m.Assign([m.AssignTarget(m.Attribute() | m.Subscript())]) | m.AugAssign()
    if m.matches(node, called | m.Raise() | kept):
        yield cst.Pass()


def _nothing(node: cst.Return) -> Iterator[cst.CSTNode]:
    if node.value is not None and not m.matches(node.value, m.Name("None")):
        yield node.with_changes(value=cst.Name("None"), whitespace_after_return=cst.SimpleWhitespace(" "))


def _decided(node: cst.If | cst.While) -> Iterator[cst.CSTNode]:
    space = cst.SimpleWhitespace(" ")
    name = "whitespace_before_test" if isinstance(node, cst.If) else "whitespace_after_while"
    for test in (_FALSE, _TRUE) if isinstance(node, cst.If) else (_FALSE,):
        yield node.with_changes(test=test, **{name: space})


def _all(node: cst.CompFor) -> Iterator[cst.CSTNode]:
    if node.ifs:
        yield node.with_changes(ifs=[])


def _never(node: cst.For) -> Iterator[cst.CSTNode]:
    yield node.with_changes(iter=cst.Tuple([]))


def _without(node: cst.With) -> Iterator[cst.CSTNode]:
    if not any(item.asname for item in node.items):
        yield cst.If(_TRUE, node.body, leading_lines=node.leading_lines)


def _less_caught(node: cst.ExceptHandler) -> Iterator[cst.CSTNode]:
    if node.type is None or m.matches(node.type, m.Name("BaseException")):
        yield node.with_changes(type=cst.Name("Exception"), whitespace_after_except=cst.SimpleWhitespace(" "))
    yield node.with_changes(body=cst.IndentedBlock([cst.SimpleStatementLine([cst.Raise()])]))


def _no_end(node: cst.Try) -> Iterator[cst.CSTNode]:
    if node.finalbody is not None and not node.handlers:
        yield cst.If(_TRUE, node.body, leading_lines=node.leading_lines)
    elif node.finalbody is not None:
        yield node.with_changes(finalbody=None)


def _undecorated(node: cst.FunctionDef) -> Iterator[cst.CSTNode]:
    for number in range(len(node.decorators)):
        yield node.with_changes(decorators=[*node.decorators[:number], *node.decorators[number + 1 :]])


_OURS = {mutators.operator_string: _texts, mutators.operator_arg_removal: _arguments}
OPERATORS = [
    *((kind, _OURS.get(change, change)) for kind, change in mutators.mutation_operators),
    (cst.BaseSmallStatement, _gone),
    (cst.Return, _nothing),
    ((cst.If, cst.While), _decided),
    (cst.CompFor, _all),
    (cst.For, _never),
    (cst.With, _without),
    (cst.ExceptHandler, _less_caught),
    (cst.Try, _no_end),
    (cst.FunctionDef, _undecorated),
]


@dataclass
class Mutant:
    """One change of a file: `lines` are those of its statement, first and last."""

    file: str
    lines: tuple[int, int]
    module: cst.Module
    there: cst.CSTNode
    instead: cst.CSTNode

    def text(self) -> str | None:
        """The file with the change; None if that is no Python or the same Python."""
        text = self.module.deep_replace(self.there, self.instead).code
        try:
            return text if ast.dump(ast.parse(text)) != ast.dump(ast.parse(self.module.code)) else None
        except SyntaxError:
            return None


class _Changes(cst.CSTVisitor):
    METADATA_DEPENDENCIES = (PositionProvider, ParentNodeProvider)

    def __init__(self, file: str, module: cst.Module):
        self.mutants: list[Mutant] = []
        self._file, self._module = file, module

    def on_visit(self, node: cst.CSTNode) -> bool:
        if m.matches(node, _SILENT):
            return False
        for kind, change in OPERATORS:
            if isinstance(node, kind):
                for instead in change(node):
                    self.mutants.append(Mutant(self._file, self._lines(node), self._module, node, instead))
        return not isinstance(node, cst.Raise)

    def _lines(self, node: cst.CSTNode) -> tuple[int, int]:
        """Of the statement around a node; of one that has others in it, those of the node."""
        first = self.get_metadata(PositionProvider, node).start.line
        last = self.get_metadata(PositionProvider, node).end.line
        if m.matches(node, m.If() | m.While() | m.For() | m.With() | m.Try() | m.ExceptHandler() | m.FunctionDef()):
            body = self.get_metadata(PositionProvider, node.body)  # type: ignore[attr-defined]
            return first, body.start.line
        while not isinstance(node, (cst.SimpleStatementLine, cst.BaseCompoundStatement, cst.Module)):
            node = self.get_metadata(ParentNodeProvider, node)
        if isinstance(node, cst.SimpleStatementLine):
            place = self.get_metadata(PositionProvider, node)
            first, last = place.start.line, place.end.line
        return first, last


def mutants(package: Path, file: str) -> list[Mutant]:
    """All of a file, in its order."""
    wrapper = MetadataWrapper(cst.parse_module((package / file).read_text()), unsafe_skip_copy=True)
    changes = _Changes(file, wrapper.module)
    wrapper.visit(changes)
    return changes.mutants
