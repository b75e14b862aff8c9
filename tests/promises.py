"""Writes the tables of docs/reliability.md: which files keep a promise.

    python tests/promises.py

A promise is a row of the page, below the heading of its group; who keeps it bears the mark
`pytest.mark.promise("its text")`, as a file (`pytestmark`) or as a single test.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "reliability.md"
# A group, and the rows of its table.
TABLE = re.compile(
    r"^<!-- table (.+): written by tests/promises\.py -->\n\n\| promise \| test \|\n\|---\|---\|\n((?:\|.*\|\n)*)\n"
    r"<!-- end of table -->$",
    flags=re.MULTILINE,
)
ROW = re.compile(r"^\| (.+?) \| (.*) \|$", flags=re.MULTILINE)


def marked(source: str) -> Iterator[str]:
    """The promises that a file of tests keeps; it is only read, not imported."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.promise":
            yield from (ast.literal_eval(text) for text in node.args)


def kept() -> dict[str, list[str]]:
    """By promise, the files that keep it: paths in tests/."""
    files: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for promise in dict.fromkeys(marked(path.read_text(encoding="utf-8"))):
            files.setdefault(promise, []).append(str(path.relative_to(TESTS)))
    return files


def promised(page: str) -> dict[str, list[str]]:
    """By group, its promises."""
    return {group: [promise for promise, _ in ROW.findall(rows)] for group, rows in TABLE.findall(page)}


def written(page: str) -> str:
    """The page with the files that keep each promise."""
    files = kept()

    def row(found: re.Match[str]) -> str:
        return f"| {found[1]} | {', '.join(f'`{file}`' for file in files.get(found[1], []))} |"

    return TABLE.sub(lambda table: table[0].replace(table[2], ROW.sub(row, table[2])), page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
