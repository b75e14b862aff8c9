"""Writes the pages of docs/api/ from the docstrings, for `make docs`: GitHub shows them as they are.

All but commands.md, which commands.py writes.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterator
from pathlib import Path

import griffe
from griffe2md import ConfigDict, render_object_docs

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "api"
FOOT = "*`make docs` writes this page from the docstrings. Names that are not in the API may change without notice.*"
COMMON = "What every quantizer has"
INTRODUCTION = (
    "`ddp.Quantizer`, `fsdp.Quantizer`, `Averager` and `DynamicQuantizer` all have these members. The type `Session` "
    "in signatures stands for any of the four."
)
_MEMBERS = ("bits", "state_dict", "load_state_dict", "drop_residuals", "check_replicas")
# By page: its title, and what it has an entry for.
SECTIONS = {
    "ddp": (
        "DistributedDataParallel",
        ["ddp.compress", "ddp.Quantizer", "ddp.transport", *(f"sessions.session.Session.{name}" for name in _MEMBERS)],
    ),
    "fsdp": ("FSDP2", ["fsdp.register_backend", "fsdp.attach", "fsdp.Quantizer"]),
    "averager": ("Loops of your own", ["Averager"]),
    "horovod": ("Horovod", ["DynamicQuantizer"]),
    "controller": (
        "Controller, policies and momentum",
        [
            *("Controller", "StepFunction", "Static", "Schedule", "Plateau", "CriticalRegime", "LinkAware"),
            *("Policy", "Decision", "Record", "less_momentum"),
        ],
    ),
    "meter": (
        "Levels, bytes, errors and diagnostics",
        ["LEVELS", "Meter", "Traffic", "LockstepError", "ControllerError", "diagnostics.relative_errors"],
    ),
    "integrations": (
        "Frameworks and checkpoints",
        [
            "integrations.transformers.CompressionCallback",
            "integrations.lightning.CompressionCallback",
            *("AllRanks", "PerRank"),
        ],
    ),
}
# What other modules and frameworks call, and users do not.
INTERNAL = (
    *("take", "broken", "everyone", "label", "share", "trained", "latest_exchange", "on_.*", "setup"),
    *("compress", "decompress", "connect", "failed"),
)
MADE_BY_CALLS = ("ddp.Quantizer", "fsdp.Quantizer")
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
    heading_level=2,
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
    show_signature_annotations=True,
    signature_crossrefs=False,
    summary=False,
)


def title(name: str) -> str:
    """What a user writes."""
    return re.sub(r"^sessions\.session\.Session\.", "quantizer.", name)


def spell_out(owner: griffe.Class | griffe.Function, options: griffe.Class) -> None:
    """Replace constants by their values, and `**options: Unpack[Options]` by what `Options` documents."""
    function = owner if isinstance(owner, griffe.Function) else owner.members.get("__init__")
    parameters = getattr(function, "parameters", ())
    for each in parameters:
        if isinstance(each.default, griffe.ExprName) and each.default.name.isupper():
            each.default = owner.package[each.default.canonical_path.partition(".")[2]].value
    if not parameters or str(parameters[-1].annotation) != "Unpack[Options]":
        return
    [documented] = [each.value for each in options.docstring.parsed if each.kind.value == "attributes"]
    [listed] = [each.value for each in owner.docstring.parsed if each.kind.value == "parameters"]
    del parameters[parameters[-1].name]
    listed.pop()
    for each in documented:
        default = re.search(r"Default:\s+(\w+)", each.description)[1]
        annotation = options.members[each.name].annotation
        kind = griffe.ParameterKind.keyword_only
        parameters.add(griffe.Parameter(each.name, annotation=annotation, kind=kind, default=default))
        text = each.description
        listed.append(griffe.DocstringParameter(each.name, description=text, annotation=annotation, value=default))


def entry(package: griffe.Module, name: str) -> str:
    """Under the headings that users know, and with links of types reduced to those that lead somewhere."""
    found = package[name]
    found = found.final_target if found.is_alias else found
    if name in MADE_BY_CALLS:
        found.del_member("__init__")
    if not found.is_attribute:
        spell_out(found, package["sessions.options.Options"])
    text = render_object_docs(found, LOOKS)
    text = re.sub(r"\[([^][]*)\]\(#([^)]*)\)", _type, text)
    text = re.sub(r"(?<=^```python\n)(.*?)(?=\n```$)", _signature, text, flags=re.DOTALL | re.MULTILINE)
    if name.startswith(("ddp.", "fsdp.")):
        text = text.replace("-> Quantizer", f"-> {name.partition('.')[0]}.Quantizer", 1)
    text = re.sub(r"^Bases: .*Session\].*$", f"See also [what every quantizer has]({COMMON}).", text, flags=re.M)
    text = re.sub(r"^Bases: .*\*.*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"^### `.*?(\w+)`$", rf"### `{name}.\1`", text, flags=re.MULTILINE)
    if name.startswith("sessions."):
        return re.sub(r"\A## .*", f"### `{title(name)}`", text.strip())
    file = found.relative_package_filepath
    return re.sub(r"\A## .*", f"## `{title(name)}`\n\nSource: [{file}](../../{file})", text.strip())


def _type(link: re.Match[str]) -> str:
    """A link of griffe2md: to a page elsewhere, to this package's name for `linked`, or none."""
    label, path = link.groups()
    if path in ELSEWHERE:
        return f"[{label}]({ELSEWHERE[path]})"
    own = re.fullmatch(r"hvd_dyncomp\.(?:(ddp|fsdp)\.)?.*\.[A-Z]\w*", path)
    return f"[{'.'.join(filter(None, (own[1], label)))}](#)" if own else label


def _signature(found: re.Match[str]) -> str:
    """On one line, or with a line for each parameter."""
    text = " ".join(found[0].split()).removesuffix(" -> None").replace("'", '"')
    if len(text) <= 100 or not text.endswith(")") and ") -> " not in text:
        return text
    head, _, rest = text.partition("(")
    inside, depth, lines = "", 1, []
    for place, character in enumerate(rest):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0:
            return f"{head}(\n" + "".join(f"    {line},\n" for line in [*lines, inside.strip()]) + rest[place:]
        if character == "," and depth == 1:
            lines.append(inside.strip())
            inside = ""
        else:
            inside += character
    return text


def linked(pages: dict[str, str]) -> Iterator[tuple[str, str]]:
    """With a link for each name that has a heading on one of the pages, unless it stands below that heading."""
    places = {
        heading: page for page, text in pages.items() for heading in re.findall(r"^###? `(.*)`$", text, flags=re.M)
    }
    places[COMMON] = "ddp"
    classes = collections.Counter(heading.rpartition(".")[2] for heading in places)
    by_class = {heading.rpartition(".")[2]: heading for heading in places}

    def heading_of(name: str, here: str) -> str | None:
        if name in ("Session", "OptimizerSession"):
            return COMMON
        name = re.sub(r"^Session\.", "quantizer.", name).removeprefix("hvd_dyncomp.")
        for within in (f"{here}.", f"{here.rpartition('.')[0]}.", ""):
            if within + name in places:
                return within + name
        return by_class[name] if classes[name] == 1 and name[0].isupper() else None

    def address(heading: str, page: str) -> str:
        anchor = re.sub("[^a-z0-9_-]", "", heading.lower().replace(" ", "-"))
        return f"#{anchor}" if places[heading] == page else f"{places[heading]}.md#{anchor}"

    for page, text in pages.items():
        here, lines, fenced = "", [], False
        arguments: set[str] = set()  # of the entry; a method may have the same name

        def link(found: re.Match[str], page: str = page) -> str:
            name = found["type"] or found["code"]
            heading = heading_of(name.removesuffix("()"), here)  # noqa: B023  # that of the line
            shown = name if found["type"] else f"`{name}`"
            if heading in (None, here) or name in arguments:  # noqa: B023
                return shown
            return f"[{shown}]({address(heading, page)})"

        for line in text.replace(f"]({COMMON})", f"]({address(COMMON, page)})").split("\n"):
            fenced ^= line.startswith("```")
            if line.startswith("##"):
                here = line.strip("# `")
                arguments.clear()
            elif fenced:
                arguments.update(re.findall(r"(\w+): ", line))
            elif not line.startswith("    "):
                line = re.sub(r"\[(?P<type>[\w.]+)\]\(#\)|(?<!\[)`(?P<code>[\w.]+(?:\(\))?)`", link, line)
                line = re.sub(r"<code>([^[]*?)</code>", r"`\1`", line)
                line = re.sub(r"(?<![\w/(])docs/(\w+)\.md", r"[docs/\1.md](../\1.md)", line)
            lines.append(line)
        yield page, re.sub(r"\n{3,}", "\n\n", "\n".join(lines))


def written() -> Iterator[tuple[str, str]]:
    """The text of each page, by name."""
    package = griffe.load(
        "hvd_dyncomp",
        search_paths=[ROOT],
        docstring_parser="google",
        docstring_options={"returns_multiple_items": False},
        resolve_aliases=True,
        resolve_external=False,
    )
    pages = {}
    for page, (name, entries) in SECTIONS.items():
        parts = [f"# {name}"]
        for each in entries:
            if each.startswith("sessions.") and parts[-1].startswith("## "):
                parts.append(f"## {COMMON}\n\n{INTRODUCTION}")
            parts.append(entry(package, each))
        pages[page] = "\n\n".join([*parts, FOOT])
    return linked(pages)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for page, text in written():
        (FOLDER / f"{page}.md").write_text(f"{text}\n", encoding="utf-8")
