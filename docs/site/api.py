"""Writes docs/api.md from the docstrings, for `make docs`: GitHub shows it as it is."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import griffe
from griffe2md import ConfigDict, render_object_docs

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "api.md"
HEAD = """# API

`make docs` writes this page from the docstrings. Names that are not here may change without notice."""
SECTIONS = {
    "Compressor, controller and optimizer": ["DynamicQuantizer", "Controller", "less_momentum", "AllRanks"],
    "DistributedDataParallel": ["ddp.compress", "ddp.Quantizer", "ddp.transport"],
    "FSDP2": ["fsdp.compress", "fsdp.Quantizer", "fsdp.PerRank"],
    "Frameworks": ["integrations.transformers.CompressionCallback", "integrations.lightning.CompressionCallback"],
    "Loops of your own": ["Averager"],
    "Policies": [
        *("StepFunction", "Static", "Schedule", "Plateau", "CriticalRegime"),
        *("Policy", "Decision", "Record"),
    ],
    "Levels and bytes": ["LEVELS", "Meter", "Traffic"],
    "Errors": ["ControllerError", "LockstepError"],
    "Pages about runs": ["report.runs.read_runs", "report.page.page", "report.runs.UnreadableRun"],
}
LOOKS = ConfigDict(
    docstring_section_style="list",
    filters=["!^_"],
    group_by_category=False,
    heading_level=3,
    line_length=100,
    load_external_modules=False,
    members_order="source",
    merge_init_into_class=True,
    separate_signature=True,
    show_category_heading=False,
    show_if_no_docstring=False,
    show_object_full_path=False,
    show_root_full_path=False,
    signature_crossrefs=False,
    summary=False,
)


def plain(text: str, name: str) -> str:
    """Without links to headings that this page does not have; headings say what a user writes."""
    text = re.sub(r"\[([^][]*)\]\(#[^)]*\)", r"\1", text)
    text = re.sub(r"</?code>", "`", text)
    text = re.sub(r"(?<=^```python\n).*$", wrapped, text, flags=re.MULTILINE)
    text = re.sub(r"^#### `hvd_dyncomp\.", "#### `", text, flags=re.MULTILINE)
    text = re.sub(r"\A### .*", f"### `{name}`", text.strip())
    return re.sub(r"\n{3,}", "\n\n", text)


def wrapped(signature: re.Match[str]) -> str:
    return textwrap.fill(signature[0], 100, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def page() -> str:
    package = griffe.load(
        "hvd_dyncomp", search_paths=[ROOT], docstring_parser="google", resolve_aliases=True, resolve_external=False
    )
    parts = [HEAD]
    for section, names in SECTIONS.items():
        parts.append(f"## {section}")
        parts += [plain(render_object_docs(package[name], LOOKS), name) for name in names]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
