"""Tables in Markdown."""

from __future__ import annotations


def markdown(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table whose first column is text and whose others are numbers."""
    rule = ("---", *("---:" for _ in head[1:]))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))
