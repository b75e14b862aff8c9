"""Runs that nobody has trained, as launch/train_resnet.py would leave them, and pages about them, taken apart again."""

import json
import re
from collections.abc import Sequence
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
        if self._open and self._open[-1] in ("th", "td"):
            self._table[-1][-1] += data


def figures(text: str) -> dict[str, ElementTree.Element]:
    """The figures of a page by their titles, parsed as strictly as XML is."""
    found = re.findall(
        r'<figcaption>(.*?)</figcaption><div role="img" aria-label="(.*?)">\s*(<svg.*?</svg>)', text, re.DOTALL
    )
    assert all(said.startswith(f"{title};") for title, said, _ in found)
    return {title: ElementTree.fromstring(svg) for title, _, svg in found}  # noqa: S314


def texts(figure: ElementTree.Element) -> list[str]:
    return ["".join(one.itertext()) for one in figure.iter(f"{SVG}text")]
