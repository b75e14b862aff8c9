"""Runs that nobody has trained, as launch/train_resnet.py would leave them, and pages about them, taken apart again."""

import json
import math
import re
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

SVG = "{http://www.w3.org/2000/svg}"
LEVELS = (4, 4, 8, 8, 32, 8)
REASONS = {1: "val_accuracy 0.81 reached 0.8", 3: "uncompressed: 5 epochs at 8 bits", 4: "uncompressed epochs ended"}


def line(epoch: int, levels: Sequence[float] = LEVELS, **changed: object) -> dict:
    """What metrics.jsonl has of an epoch; every number in it is another one."""
    level = levels[epoch]
    whole = {
        "epoch": epoch,
        "level": level,
        "next_level": levels[min(epoch + 1, len(levels) - 1)],
        "reason": REASONS.get(epoch, "hold"),
        "steps_by_level": {str(level): 10},
        "tensor_errors": {},
        "train_loss": 2.3 / (epoch + 1),
        "train_accuracy": 0.5 + 0.071 * epoch,
        "val_accuracy": 0.45 + 0.06 * epoch,
        "test_accuracy": 0.41 + 0.083 * epoch,
        "hosts": 1,
        "bytes_sent": 1e6 * level + 1000 * epoch,
        "bytes_float32": 32e6,
        "bytes_leaving_host": 0.0,
        "bytes_staying_on_host": 2e6 * level,
        "bytes_float32_leaving_host": 0.0,
        "seconds": 9.0 + epoch,
        "seconds_compute": 5.0 + 0.25 * epoch,
        "seconds_exchange": 1.0 + 0.5 * epoch,
        "lr": 0.1,
    }
    return whole | changed


def write(folder: Path, lines: Sequence[dict], config: dict | None = None, after: str = "") -> Path:
    """The files of a run; without a config it is one under way. ``after`` is what stands after the last whole line."""
    folder.mkdir(parents=True)
    text = "".join(json.dumps(one) + "\n" for one in lines)
    (folder / "metrics.jsonl").write_text(text + after, encoding="utf-8")
    if config is not None:
        (folder / "summary.json").write_text(json.dumps({"config": config}), encoding="utf-8")
    return folder


class Page(HTMLParser):
    """The elements of a page: that all are closed in the right order, their attributes, and all text in between."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.tables: dict[str | None, list[list[str]]] = {}
        self._open: list[str] = []
        self._table: list[list[str]] | None = None
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "link"):
            self._open.append(tag)
        if tag == "table":
            self._table = self.tables[dict(attrs).get("id")] = []
        elif tag == "tr":
            self._table.append([])
        elif tag in ("th", "td"):
            self._table[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag
        if tag == "table":
            self._table = None

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._table is not None and self._table and self._table[-1]:
            self._table[-1][-1] += data


def figures(text: str) -> dict[str, ElementTree.Element]:
    """The figures of a page by their ids, parsed as strictly as XML is."""
    found = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]  # noqa: S314
    return {figure.get("id"): figure for figure in found}


def of_class(figure: ElementTree.Element, name: str, tag: str = "*") -> list[ElementTree.Element]:
    return [one for one in figure.iter() if name in one.get("class", "").split() and tag in ("*", one.tag[len(SVG) :])]


def number(element: ElementTree.Element, key: str) -> float:
    return float(element.get(key))


def axis(figure: ElementTree.Element, kind: str) -> Callable[[float], float]:
    """From a place to the value there, by what the ticks of an axis say: "x", "y", or "level", which is logarithmic."""
    place = "x" if kind == "x" else "y"
    ticks = [(number(tick, place) - (0 if place == "x" else 4), float(tick.text)) for tick in of_class(figure, kind)]
    if kind == "level":
        ticks = [(at, math.log2(value)) for at, value in ticks]
    (first, low), (last, high) = ticks[0], ticks[-1]
    assert all(
        math.isclose(value, low + (at - first) / (last - first) * (high - low), rel_tol=1e-3, abs_tol=1e-3)
        for at, value in ticks
    )

    def value(at: float) -> float:
        read = low + (at - first) / (last - first) * (high - low)
        return 2**read if kind == "level" else read

    return value


def curve(figure: ElementTree.Element, run: str) -> list[tuple[float, float]]:
    """(epoch, value) of a run's points, epochs counted from 1, as somebody reads them off the axes."""
    (group,) = [one for one in of_class(figure, "curve") if one.get("data-run") == run]
    across, up = axis(figure, "x"), axis(figure, "y")
    points = [(across(number(dot, "cx")), up(number(dot, "cy"))) for dot in group.iter(f"{SVG}circle")]
    lines = [
        tuple(map(float, pair.split(","))) for one in group.iter(f"{SVG}polyline") for pair in one.get("points").split()
    ]
    drawn = [(number(dot, "cx"), number(dot, "cy")) for dot in group.iter(f"{SVG}circle")]
    assert set(lines) <= set(drawn)
    return points


def pieces(figure: ElementTree.Element, run: str) -> list[int]:
    """How many points each uninterrupted piece of a run's line has."""
    (group,) = [one for one in of_class(figure, "curve") if one.get("data-run") == run]
    return [len(one.get("points").split()) for one in group.iter(f"{SVG}polyline")]
