"""The page: tables and figures in order, in one file that needs nothing else."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import resources

import jinja2

from hvd_dyncomp.commands.report import figures, tables
from hvd_dyncomp.commands.report.runs import Run

# What XML 1.0, and with it SVG, does not have in any spelling; lone surrogates cannot be encoded either.
_IMPOSSIBLE = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def page(runs: Sequence[Run]) -> str:
    """The HTML of a report of these runs. A run's colour follows its place in the list.

    This module needs matplotlib: ``pip install hvd_dyncomp[report]``.

    Examples:
        >>> html = page([Run("low", epochs=(), config={"bits": 4})])
        >>> "low: no epoch is finished yet." in html
        True
    """
    text = resources.files("hvd_dyncomp.commands.report").joinpath("page.html").read_text(encoding="utf-8")
    template = jinja2.Template(text, autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    shown = tables.quantities(runs)
    curves = [(quantity.title, figures.by_epoch(quantity, runs)) for quantity in shown]
    filled = template.render(runs=runs, tables=tables, figures=figures, shown=shown, curves=curves)
    return _IMPOSSIBLE.sub("\ufffd", filled)
