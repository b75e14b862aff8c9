"""Tables in Markdown, and pages that hold some between marks."""

from __future__ import annotations

import re
from collections.abc import Mapping

DASH = "—"  # for what is not there


def markdown(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table whose first column is text and whose others are numbers."""
    rule = ("---", *("---:" for _ in head[1:]))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))


def filled(page: str, tables: Mapping[str, str], by: str) -> str:
    """A page with tables between their marks, by name, as a command writes them. Those without marks are not shown."""
    for name, shown in tables.items():
        mark = f"<!-- table {name}: written by {by} -->"
        end = "<!-- end of table -->"
        pattern = re.compile(f"{re.escape(mark)}\n.*?{re.escape(end)}", re.DOTALL)
        text = f"{mark}\n\n{shown}\n\n{end}"
        page = pattern.sub(lambda _, text=text: text, page)  # type: ignore[misc]
    return page
