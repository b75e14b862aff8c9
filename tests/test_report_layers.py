"""The figure of the report that has a row for each tensor, read off its own axes."""

from pathlib import Path
from xml.etree import ElementTree

from made_up_runs import SVG, axis, figures, line, number, of_class, write

from hvd_dyncomp.report import heatmap
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
        colours = {epoch: heatmap.colour(value) for epoch, value in expected.items()}
        assert read[name] == {epoch: (value, colours[epoch]) for epoch, value in expected.items()}


def test_colours_tell_errors_apart() -> None:
    fills = [heatmap.colour(heatmap.LEAST * 2**power) for power in range(9)]
    assert len(set(fills)) == 9
    assert heatmap.colour(0) == fills[0] and heatmap.colour(1e9) == fills[-1]


def test_runs_that_say_nothing_of_tensors_have_no_such_figure(tmp_path: Path) -> None:
    assert "errors-1" not in drawn(tmp_path / "run", tensor_errors=[{}, {}])


def test_levels_and_bytes_by_tensor_of_older_runs_are_not_read(tmp_path: Path) -> None:
    errors = [{"fc": 0.5}] * 2
    old = {"tensor_levels": [{"fc": 2}, {"fc": "anything"}], "tensor_bytes": [{"fc": 1e6}, {"fc": -1}]}
    new = drawn(tmp_path / "new", tensor_errors=errors)
    assert drawn(tmp_path / "run", tensor_errors=errors, **old).keys() == new.keys()
    assert "errors-1" in new
