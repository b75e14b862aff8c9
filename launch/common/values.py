"""How flags are read: argparse types, whose errors name what was typed, and a parser that says so in one line."""

from __future__ import annotations

import math
import re
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Collection
from fractions import Fraction
from typing import NoReturn, TypeVar

from hvd_dyncomp import LEVELS
from hvd_dyncomp.levels import level_argument

_FRACTIONS = {str(Fraction(bits)): bits for bits in LEVELS}  # 1/8, 1/4, ...
DEVICES = ("auto", "cpu", "cuda")  # what --device takes
T = TypeVar("T")
_LARGEST = 2**62  # whatever is added to a seed, it stays in the range that torch takes


class Parser(ArgumentParser):
    """An argparse parser that ends with status 2 after one line, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def _integer(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not an integer") from None
    if value < least:
        raise ArgumentTypeError(f"{value} is less than {least}")
    if value > _LARGEST:
        raise ArgumentTypeError(f"{value} is more than {_LARGEST}")
    return value


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a number") from None
    if not math.isfinite(value):
        raise ArgumentTypeError(f"{text!r} is not finite")
    return value


def count(text: str) -> int:
    """An integer of at least 1."""
    return _integer(text, 1)


def natural(text: str) -> int:
    """An integer of at least 0."""
    return _integer(text, 0)


def _real(holds: Callable[[float], bool], wrong: str) -> Callable[[str], float]:
    def read(text: str) -> float:
        value = _number(text)
        if not holds(value):
            raise ArgumentTypeError(f"{text} is {wrong}")
        return value

    return read


at_least_zero = _real(lambda value: value >= 0, "less than 0")
positive = _real(lambda value: value > 0, "not greater than 0")


def folder(text: str) -> str:
    """A path. An empty one is an unset variable of a shell's rather than the current folder."""
    if not text.strip():
        raise ArgumentTypeError(f"{text!r} names no folder")
    return text


def level(text: str) -> float:
    """One of the library's bit-widths, below one bit as 0.25 or 1/4; 32 is uncompressed."""
    return level_argument(str(_FRACTIONS.get(text.strip(), text)))


def bit_levels(text: str) -> tuple[float, ...]:
    """Levels in ascending or descending order, separated by commas; 32 is where a release goes, and no step."""
    levels = tuple(level(part) for part in text.split(","))
    if 32 in levels:
        raise ArgumentTypeError(f"{text!r} contains 32, which is uncompressed")
    if list(levels) not in (sorted(set(levels)), sorted(set(levels), reverse=True)):
        raise ArgumentTypeError(f"{text!r} neither ascends nor descends")
    return levels


def accuracies(text: str) -> tuple[float, ...]:
    """Ascending numbers between 0 and 1, separated by commas; nothing at all for a single level."""
    values = tuple(_number(part) for part in text.split(",")) if text.strip() else ()
    if any(not 0 < value < 1 for value in values):
        raise ArgumentTypeError(f"{text!r}: an accuracy lies between 0 and 1")
    if list(values) != sorted(set(values)):
        raise ArgumentTypeError(f"{text!r} does not ascend")
    return values


def bit_schedule(text: str) -> dict[int, float]:
    """``epoch:bits`` pairs separated by commas, the first epoch being 0: ``0:32,2:4``."""
    schedule: dict[int, float] = {}
    for part in text.split(","):
        epoch, colon, bits = part.partition(":")
        if not colon or not epoch.strip().isdigit():
            raise ArgumentTypeError(f"{part!r} is not epoch:bits")
        if int(epoch) in schedule:
            raise ArgumentTypeError(f"{text!r} names epoch {int(epoch)} twice")
        schedule[int(epoch)] = level(bits)
    if 0 not in schedule:
        raise ArgumentTypeError(f"{text!r} does not say how epoch 0 travels")
    return schedule


def model_name(text: str) -> str:
    """``resnet18``, or ``resnet<depth>`` with a depth of 6n + 2."""
    depth = text.removeprefix("resnet")
    family = text.startswith("resnet") and depth.isdigit() and int(depth) >= 8 and (int(depth) - 2) % 6 == 0
    if not family and text != "resnet18":
        raise ArgumentTypeError(f"{text!r} is neither resnet18 nor resnet<6n+2> (resnet8, resnet14, resnet20, ...)")
    return text


def listed(one: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """Several of a type, separated by commas."""
    return lambda text: tuple(one(part) for part in text.split(",") if part)


def names(known: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """Several of these, separated by commas."""

    def name(text: str) -> str:
        if text not in known:
            raise ArgumentTypeError(f"{text!r} is not one of {', '.join(known)}")
        return text

    return listed(name)


def layout(text: str) -> tuple[int, int]:
    """2x4: hosts, and workers of each."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if match is None:
        raise ArgumentTypeError(f"{text!r} is not HOSTSxWORKERS")
    return int(match[1]), int(match[2])
