"""Checks of arguments. Each returns a plain Python value, or raises an error that names the argument and the value.

numpy's scalars pass as numbers. bool, an int in Python, never does.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

LARGEST = 2**63 - 1  # whole number: C, torch and JSON readers can hold it, and Python can print it
_SHOWN = 200  # characters of a value in an error message


def shown(value: object) -> str:
    """`value` as error messages show it: one line of limited length, of a large mapping the keys. Never raises."""
    try:
        text = repr(value)
        if len(text) > _SHOWN and isinstance(value, Mapping):
            text = f"{type(value).__name__} of {', '.join(map(repr, value))}"
    except Exception:  # noqa: BLE001  # an int of thousands of digits has no text; user objects may raise anything
        return f"<{type(value).__name__}>"
    return _line(text)


def _line(text: str) -> str:
    text = text.replace("\n", " ")
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


@contextmanager
def comes_from(origin: str, state: object, name: str = "state") -> Iterator[None]:
    """Within it a saved state is read: a file may contain anything, and any error becomes one of these.

    Args:
        origin: the method that makes such states.

    Raises:
        ValueError: in place of whatever was raised.
    """
    try:
        yield
    except Exception as error:
        cause = f"{error} is missing" if isinstance(error, KeyError) else _line(str(error) or type(error).__name__)
        raise ValueError(f"{name} must come from {origin}, got {shown(state)}: {cause}") from error


def number(name: str, value: Any) -> float:
    """A real number, NaN and infinities included, or an array or a tensor of one element.

    Raises:
        ValueError: `value` is not a number, or is too large for a float.
    """
    try:
        plain = value.item() if math.prod(getattr(value, "shape", (0,))) == 1 else value
        if isinstance(plain, numbers.Real) and not isinstance(plain, bool):
            return float(plain)
    except Exception as error:  # an int too large for a float; user objects may raise anything
        raise ValueError(f"{name} must be a number that a float can hold, got {shown(value)}") from error
    raise ValueError(f"{name} must be a number, got {shown(value)}")


def finite(name: str, value: Any, least: float = -math.inf) -> float:
    """A finite number of at least `least`.

    Raises:
        ValueError: `value` is not such a number.
    """
    plain = number(name, value)
    if not math.isfinite(plain) or plain < least:
        bound = "" if least == -math.inf else f" of at least {least:g}"
        raise ValueError(f"{name} must be a finite number{bound}, got {shown(value)}")
    return plain


def integer(name: str, value: Any, least: int, most: int = LARGEST) -> int:
    """A whole number from `least` to `most`.

    Raises:
        ValueError: `value` is not such a number.
    """
    plain = int(value) if isinstance(value, numbers.Integral) and not isinstance(value, bool) else None
    if plain is None or plain < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {shown(value)}")
    if plain > most:
        raise ValueError(f"{name} must be at most {most}, got {shown(value)}")
    return plain


def boolean(name: str, value: Any) -> bool:
    """True or False.

    Raises:
        ValueError: `value` is neither.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {shown(value)}")
    return value


def one_of(name: str, value: Any, choices: Collection[str]) -> str:
    """One of the strings in `choices`.

    Raises:
        ValueError: `value` is none of them.
    """
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be {' or '.join(map(repr, choices))}, got {shown(value)}")
    return value


def sequence(name: str, value: Any) -> tuple[Any, ...]:
    """The elements of a list, a tuple, an array: of anything with an order that can be read twice.

    Strings and bytes are refused: "48" would pass for two levels.

    Raises:
        TypeError: `value` is not a sequence.
    """
    if isinstance(value, (str, bytes, bytearray, Mapping)) or not hasattr(value, "__getitem__"):
        raise TypeError(f"{name} must be a sequence, got {shown(value)}")
    try:
        return tuple(value)
    except TypeError as error:  # an array without dimensions
        raise TypeError(f"{name} must be a sequence, got {shown(value)}") from error
