"""The figures of the report that have a row for each tensor, read off their own axes."""

from pathlib import Path
from xml.etree import ElementTree

import pytest
from made_up_runs import SVG, axis, figures, line, number, of_class, write

from hvd_dyncomp.report import heatmap, layers
from hvd_dyncomp.report.page import page
from hvd_dyncomp.report.runs import read_runs

NAMES = ["fc.bias", "conv1.weight"]


def drawn(folder: Path, **tables: list[dict[str, float]]) -> dict[str, ElementTree.Element]:
    """The figures of a run whose epochs have these tables by tensor."""
    epochs = len(next(iter(tables.values())))
    lines = [line(epoch, **{key: table[epoch] for key, table in tables.items()}) for epoch in range(epochs)]
    return figures(page(read_runs([write(folder, lines)])))


def cells(figure: ElementTree.Element) -> dict[str, dict[int, tuple[float, str]]]:
    """{tensor: {epoch, counted from 1: (value, colour)}}."""
    across, found = axis(figure, "x"), {}
    for row in of_class(figure, "tensor"):
        read = found[row.get("data-name")] = {}
        for cell in row.iter(f"{SVG}rect"):
            first, last = (across(number(cell, "x") + side * number(cell, "width")) for side in (0, 1))
            value = float(cell.get("data-value")), cell.get("fill")
            read |= dict.fromkeys(range(round(first + 0.5), round(last + 0.5)), value)
    return found


def test_the_map_of_errors_has_a_cell_for_each_tensor_and_epoch(tmp_path: Path) -> None:
    tables = [{"fc.bias": 2, "conv1.weight": 8}, {"fc.bias": 2, "conv1.weight": 8}, {"fc.bias": 0.125}]
    read = cells(drawn(tmp_path / "run", tensor_errors=tables)["errors-1"])
    assert list(read) == NAMES
    for name in NAMES:
        expected = {epoch + 1: table[name] for epoch, table in enumerate(tables) if name in table}
        colours = {epoch: layers.colour(value, heatmap.LEAST_ERROR) for epoch, value in expected.items()}
        assert read[name] == {epoch: (value, colours[epoch]) for epoch, value in expected.items()}


def test_colours_tell_levels_apart() -> None:
    fills = [layers.colour(level, layers.LEAST_LEVEL) for level in (0.125, 0.25, 0.5, 1, 2, 4, 8, 16, 32)]
    assert len(set(fills)) == 9
    assert layers.colour(0, heatmap.LEAST_ERROR) == fills[0] and layers.colour(1e9, heatmap.LEAST_ERROR) == fills[-1]


def test_bytes_by_layer_are_divided_by_level(tmp_path: Path) -> None:
    """The levels of made-up epochs are 4, 4, 8."""
    tables = [{"fc.bias": 1e6, "conv1.weight": 20e6}, {"fc.bias": 1e6, "conv1.weight": 20e6}]
    tables.append({"fc.bias": 2e6, "conv1.weight": 40e6})
    figure = drawn(tmp_path / "run", tensor_bytes=tables)["layers-1"]
    across = axis(figure, "x")
    read = {}
    for row in of_class(figure, "tensor"):
        for box in row.iter(f"{SVG}rect"):
            ends = (across(number(box, "x")), across(number(box, "x") + number(box, "width")))
            read[row.get("data-name"), float(box.get("data-level"))] = ends
            assert box.get("fill") == layers.colour(float(box.get("data-level")), layers.LEAST_LEVEL)
    expected = {("conv1.weight", 4.0): (0, 40), ("conv1.weight", 8.0): (40, 80)}
    expected |= {("fc.bias", 4.0): (0, 2), ("fc.bias", 8.0): (2, 4)}
    assert read.keys() == expected.keys()
    for key, ends in expected.items():
        assert read[key] == pytest.approx(ends, abs=0.2)


def test_runs_that_say_nothing_of_tensors_have_no_such_figure(tmp_path: Path) -> None:
    tables = {key: [{}, {}] for key in ("tensor_bytes", "tensor_errors")}
    assert not {"layers-1", "errors-1"} & drawn(tmp_path / "run", **tables).keys()


def test_levels_by_tensor_of_older_runs_are_read_and_not_shown(tmp_path: Path) -> None:
    tables = {"tensor_bytes": [{"fc": 1e6}] * 2}
    old = [{"fc": 2}, {"fc": "what no report reads"}]
    assert drawn(tmp_path / "run", **tables, tensor_levels=old).keys() == drawn(tmp_path / "new", **tables).keys()
