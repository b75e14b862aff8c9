"""Writes docs/api.md from the docstrings, for `make docs`: GitHub shows it as it is."""

from __future__ import annotations

import collections
import re
import textwrap
from pathlib import Path

import griffe
from griffe2md import ConfigDict, render_object_docs

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "api.md"
HEAD = """# API

`make docs` writes this page from the docstrings. Names that are not here may change without notice."""
COMMON = "What every quantizer has"
INTRODUCTIONS = {
    COMMON: "`DynamicQuantizer`, `ddp.Quantizer`, `fsdp.Quantizer` and `Averager` all have these members, too.",
}
SECTIONS = {
    "Compressor, controller and optimizer": ["DynamicQuantizer", "Controller", "less_momentum"],
    "Checkpoints": ["AllRanks", "PerRank"],
    "DistributedDataParallel": ["ddp.compress", "ddp.Quantizer", "ddp.transport"],
    "FSDP2": ["fsdp.register_backend", "fsdp.attach", "fsdp.Quantizer"],
    COMMON: [
        f"session.Session.{name}"
        for name in (
            *("bits", "state_dict", "load_state_dict", "drop_residuals"),
            "check_replicas",
        )
    ],
    "Frameworks": ["integrations.transformers.CompressionCallback", "integrations.lightning.CompressionCallback"],
    "Loops of your own": ["Averager"],
    "Policies": [
        *("StepFunction", "Static", "Schedule", "Plateau", "CriticalRegime", "LinkAware"),
        *("Policy", "Decision", "Record"),
    ],
    "Levels and bytes": ["LEVELS", "Meter", "Traffic"],
    "Errors": ["ControllerError", "LockstepError"],
    "Estimates": ["diagnostics.relative_errors"],
    "Pages about runs": [
        "commands.report.runs.read_runs",
        "commands.report.page.page",
        "commands.report.runs.UnreadableRun",
    ],
}
# What other modules and frameworks call, and users do not.
INTERNAL = (
    *("take", "broken", "everyone", "label", "share", "trained", "latest_exchange", "on_.*", "setup", "connect"),
    "failed",
)
ELSEWHERE = {
    "torch.Tensor": "https://docs.pytorch.org/docs/stable/tensors.html",
    "torch.nn.Module": "https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html",
    "torch.optim.Optimizer": "https://docs.pytorch.org/docs/stable/optim.html#torch.optim.Optimizer",
    "transformers.Trainer": "https://huggingface.co/docs/transformers/main_classes/trainer",
}
LOOKS = ConfigDict(
    docstring_section_style="list",
    filters=["!^_", *(f"!^{name}$" for name in INTERNAL)],
    group_by_category=False,
    heading_level=3,
    inherited_members=False,
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


def title(name: str) -> str:
    """What a user writes."""
    return re.sub(r"^session\.Session\.", "quantizer.", name)


def plain(text: str, name: str) -> str:
    """Under the headings that users know, and with links of types reduced to those that lead somewhere."""
    text = re.sub(r"\[([^][]*)\]\(#([^)]*)\)", _type, text)
    text = re.sub(r"(?<=^```python\n).*$", wrapped, text, flags=re.MULTILINE)
    text = re.sub(r"^#### `hvd_dyncomp\.", "#### `", text, flags=re.MULTILINE)
    text = re.sub(r"\A### .*", f"### `{title(name)}`", text.strip())
    return re.sub(r"\n{3,}", "\n\n", text)


def _type(link: re.Match[str]) -> str:
    """A link of griffe2md: to a page elsewhere, to this package's name for `linked`, or none."""
    label, path = link.groups()
    if path in ELSEWHERE:
        return f"[{label}]({ELSEWHERE[path]})"
    own = re.fullmatch(r"hvd_dyncomp\.(?:(ddp|fsdp)\.)?.*\.[A-Z]\w*", path)
    return f"[{'.'.join(filter(None, (own[1], label)))}](#)" if own else label


def linked(page: str) -> str:
    """With a link for each name that has a heading on the page, unless it stands below that heading."""
    headings = dict.fromkeys(re.findall(r"^###+ `(.*)`$", page, flags=re.MULTILINE))
    classes = collections.Counter(heading.rpartition(".")[2] for heading in headings)
    by_class = {heading.rpartition(".")[2]: heading for heading in headings}
    here = ""

    def heading_of(name: str) -> str | None:
        if name in ("Session", "OptimizerSession"):
            return COMMON
        name = re.sub(r"^Session\.", "quantizer.", name)
        for within in (f"{here}.", f"{here.rpartition('.')[0]}.", ""):
            if within + name in headings:
                return within + name
        return by_class[name] if classes[name] == 1 and name[0].isupper() else None

    def link(found: re.Match[str]) -> str:
        name = found["type"] or found["code"]
        heading = heading_of(name.removesuffix("()"))
        text = name if found["type"] else f"`{name}`"
        if heading is None or heading == here:
            return text
        return f"[{text}](#{re.sub('[^a-z0-9_-]', '', heading.lower().replace(' ', '-'))})"

    lines, fenced = [], False
    for line in page.split("\n"):
        fenced ^= line.startswith("```")
        if line.startswith("##"):
            here = line.strip("# `")
        elif not fenced:
            line = re.sub(r"\[(?P<type>[\w.]+)\]\(#\)|(?<!\[)`(?P<code>[\w.]+(?:\(\))?)`", link, line)
            line = re.sub(r"<code>([^[]*?)</code>", r"`\1`", line)
        if not line.startswith("Bases: ") or "](" in line:
            lines.append(line)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines))


def wrapped(signature: re.Match[str]) -> str:
    return textwrap.fill(signature[0], 100, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def page() -> str:
    package = griffe.load(
        "hvd_dyncomp", search_paths=[ROOT], docstring_parser="google", resolve_aliases=True, resolve_external=False
    )
    parts = [HEAD]
    for section, names in SECTIONS.items():
        parts += [f"## {section}", *([INTRODUCTIONS[section]] if section in INTRODUCTIONS else [])]
        parts += [plain(render_object_docs(package[name], LOOKS), name) for name in names]
    return linked("\n\n".join(parts)) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
