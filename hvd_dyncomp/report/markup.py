"""HTML and SVG as text: elements. What is not known to be markup is escaped."""

from __future__ import annotations

import html
import re
from typing import Any

# What XML 1.0, and with it SVG, does not have in any spelling; lone surrogates cannot be encoded either.
_IMPOSSIBLE = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_VOID = {"link", "meta"}


class Markup(str):
    """Text that is markup already. Only this module's functions make it."""

    __slots__ = ()


def escaped(text: str) -> Markup:
    """``text`` escaped, for use between tags or quotes. A character that XML does not have becomes U+FFFD."""
    return text if isinstance(text, Markup) else Markup(html.escape(_IMPOSSIBLE.sub("\ufffd", text)))


def joined(*parts: str) -> Markup:
    """The parts one after the other; those that are not markup are escaped."""
    return Markup("".join(map(escaped, parts)))


def element(name: str, /, *children: str, **attributes: Any) -> Markup:
    """An element. Children and attributes are escaped unless they are markup.

    Args:
        name: of the element, as it is.
        children: the content.
        attributes: ``stroke_width=2`` is ``stroke-width="2"``, ``class_`` is ``class``. Floats have at most two
            decimals. None leaves an attribute out.
    """
    opening = name
    for key, value in attributes.items():
        if value is not None:
            text = decimal(value) if isinstance(value, float) else str(value)
            opening += f' {_spelling(key)}="{escaped(text)}"'
    if name in _VOID:
        return Markup(f"<{opening}>")
    return Markup(f"<{opening}>{joined(*children)}</{name}>")


def decimal(value: float, places: int = 2) -> str:
    """A number with at most ``places`` decimals, without zeros at the end; never "-0"."""
    text = f"{value:.{places}f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text


def _spelling(key: str) -> str:
    return key if key == "viewBox" else key.rstrip("_").replace("_", "-")
