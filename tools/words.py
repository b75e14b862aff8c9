"""Checks what people read, for `make lint`: the length of the README, and words to avoid on all pages.

What a program writes does not count: docs/tables/, docs/api/, and tables between marks.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

WORDS = 800  # of the README's prose
CODE = re.compile(r"^```.*?^```$|^    .*?$|^\|.*?$", flags=re.DOTALL | re.MULTILINE)  # and its own tables
GENERATED = re.compile(r"docs/(tables|api)/.*\.md")
TABLE = re.compile(r"^<!-- table .*?^<!-- end of table -->$", flags=re.DOTALL | re.MULTILINE)

# What to write instead. Some have a place where they are meant: the pages of those who read the code.
AVOIDED = {
    r"(?<![\w./-])1/[248](?!\w)(?! of\b)": "0.5, 0.25 or 0.125",
    r"(runs?|trainings?) (that )?(was|were|is|are) lost|lost runs?": "diverged",
    r"contenders?|rivals?": "method",
    r"ladders?": "schedule",
    r"(release[sd]?|releasing) (compression|the level)|epochs? of release": "uncompressed epochs",
    r"one[- ]level": "flat",
    r"anew": "again",
    r"comes? and go(es)?": "join and leave",
    r"tickets?|greetings?|intakes?|tall(y|ies)": "(only in docs/dev/)",
}
MEANT = {
    "docs/dev/design.md": r"greetings?",
    "docs/dev/decisions.md": r"greetings?",
    "docs/wire_format.md": r"greetings?",
}


def pages() -> dict[str, str]:
    """The text that people write, by path."""
    listed = subprocess.run(["git", "ls-files", "README.md", "docs/*.md"], check=True, capture_output=True, text=True)
    paths = [path for path in listed.stdout.split() if not GENERATED.fullmatch(path) and Path(path).exists()]
    return {path: TABLE.sub("", Path(path).read_text(encoding="utf-8")) for path in paths}


def avoided(path: str, text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), 1):
        for pattern, instead in AVOIDED.items():
            for found in re.finditer(rf"\b(?:{pattern})\b" if pattern[0] != "(" else pattern, line, re.IGNORECASE):
                if not re.fullmatch(MEANT.get(path, "(?!)"), found[0], re.IGNORECASE):
                    yield f"{path}:{number}: {found[0]!r}: write {instead}"


def complaints(texts: dict[str, str]) -> Iterator[str]:
    readme = texts["README.md"]
    if (words := len(CODE.sub("", readme).split())) > WORDS:
        yield f"README.md has {words} words of prose; {WORDS} are enough"
    for path, text in texts.items():
        yield from avoided(path, text)


def main() -> None:
    if found := list(complaints(pages())):
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main()
