"""Writes docs/api/commands.md from the parsers of `python -m hvd_dyncomp`: `make docs` runs it where torch is."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator
from pathlib import Path

from hvd_dyncomp import __main__

PAGE = Path(__file__).parents[1] / "api" / "commands.md"
HEAD = """# Commands

`python -m hvd_dyncomp COMMAND`, which is also installed as `hvd-dyncomp COMMAND`.
[Will it speed up my job?](../will_it_pay.md) shows how to use `probe` and `run`, and [Monitoring](../runs.md) has
examples of `run` and `report`."""
FOOT = "*`make docs` writes this page from the commands' own help.*"


def entries() -> Iterator[str]:
    parser = __main__.commands()
    [commands] = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    for name, command in commands.choices.items():
        usage = " ".join(command.format_usage().removeprefix("usage: ").split())
        yield f"## `{name}`"
        yield "```text\n" + textwrap.fill(usage, 100, subsequent_indent="    ", break_on_hyphens=False) + "\n```"
        yield command.description
        yield "\n".join(argument(command, each) for each in command._actions if each.help != argparse.SUPPRESS)


def argument(command: argparse.ArgumentParser, action: argparse.Action) -> str:
    """A flag or positional argument with its help, and its default where the help does not say it."""
    formatter = command._get_formatter()
    shown = formatter._format_action_invocation(action)
    text = formatter._expand_help(action)
    if "default" not in text and action.option_strings and action.nargs != 0 and action.default:
        text += f"; default: {action.default}"
    return f"- **`{shown}`** – {text}"


if __name__ == "__main__":
    PAGE.write_text("\n\n".join([HEAD, *entries(), FOOT]) + "\n", encoding="utf-8")
