"""The page about training runs: what its figures show, its tables and text, its errors."""

import json
import math
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from made_up_runs import LEVELS, REASONS, Page, figures, line, texts, write
from matplotlib.figure import Figure

import hvd_dyncomp
from hvd_dyncomp.__main__ import main
from hvd_dyncomp.commands.report import figures as drawing
from hvd_dyncomp.commands.report.page import page
from hvd_dyncomp.commands.report.runs import read_run, read_runs
from hvd_dyncomp.commands.report.tables import quantities

ROOT = Path(__file__).parents[1]
EPOCHS = range(len(LEVELS))
LINES = [line(epoch) for epoch in EPOCHS]
CONFIG = {"model": "resnet8", "dataset": "digits", "world_size": 2, "epochs": 6, "compression": "dynamic"}
CONFIG |= {"policy": "step", "levels": [4, 8], "bits": 8}
SO_FAR = [sum(one["bytes_sent"] for one in LINES[: epoch + 1]) / 1e6 for epoch in EPOCHS]
SHOWN = {
    "Training accuracy": ("training accuracy, %", [100 * one["train_accuracy"] for one in LINES]),
    "Validation accuracy": ("validation accuracy, %", [100 * one["val_accuracy"] for one in LINES]),
    "Test accuracy": ("test accuracy, %", [100 * one["test_accuracy"] for one in LINES]),
    "Training loss": ("training loss, nats", [one["train_loss"] for one in LINES]),
    "Compute": ("compute in an epoch, seconds", [one["seconds_compute"] for one in LINES]),
    "Exchange": ("exchange in an epoch, seconds", [one["seconds_exchange"] for one in LINES]),
    "Bytes by epoch": ("sent per worker in an epoch, MB", [one["bytes_sent"] / 1e6 for one in LINES]),
    "Bytes so far": ("sent per worker so far, MB", SO_FAR),
}


def report(*folders: Path) -> str:
    return page(read_runs(folders))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "one", LINES, CONFIG)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page about that run."""
    return report(write(tmp_path_factory.mktemp("page") / "one", LINES, CONFIG))


def drawn(title: str, *folders: Path) -> Figure:
    """A figure before it is SVG, for its data."""
    runs = read_runs(folders)
    (quantity,) = [one for one in quantities(runs) if one.title == title]
    return drawing.by_epoch(quantity, runs)


def curves(figure: Figure) -> list[tuple[list[float], list[float]]]:
    """The epochs and values of each run's curve; a missing value is NaN."""
    return [(list(one.get_xdata()), list(one.get_ydata())) for one in figure.axes[0].lines if one.get_marker() == "o"]


def switch_lines(figure: Figure) -> list[tuple[float, str]]:
    """Where changes of level are drawn, and their numbers."""
    lines = [one.get_xdata()[0] for one in figure.axes[0].lines if one.get_marker() != "o"]
    return list(zip(lines, [one.get_text().strip() for one in figure.axes[0].texts], strict=True))


def column(text: str, label: str) -> list[str]:
    """Of the table of the numbers that figures show."""
    head, *rows = Page(text).tables["numbers"]
    return [row[head.index(label)] for row in rows]


# Figures


@pytest.mark.parametrize("title", SHOWN)
def test_figures_and_their_table_have_the_values_of_the_run(title: str, folder: Path, text: str) -> None:
    label, values = SHOWN[title]
    assert curves(drawn(title, folder)) == [([1, 2, 3, 4, 5, 6], pytest.approx(values))]
    assert [float(cell) for cell in column(text, label)] == pytest.approx(values, rel=1e-3)
    said = texts(figures(text)[title])
    assert {"epoch", label, "level, bits per value (shaded)", *"123456"} < set(said)


def test_every_switch_is_a_line_with_its_number_and_a_row_with_its_reason(folder: Path, text: str) -> None:
    assert switch_lines(drawn("Training loss", folder)) == [(2.5, "1"), (4.5, "2"), (5.5, "3")]
    assert Page(text).tables["switches"] == [
        ["no.", "run", "after epoch", "from, bits", "to, bits", "reason"],
        ["1", "one", "2", "4", "8", REASONS[1]],
        ["2", "one", "4", "8", "32", REASONS[3]],
        ["3", "one", "5", "32", "8", REASONS[4]],
    ]


def test_a_value_that_is_missing_interrupts_its_line(tmp_path: Path) -> None:
    lines = [line(epoch, **({"train_loss": None, "bytes_sent": None} if epoch == 2 else {})) for epoch in EPOCHS]
    run = write(tmp_path / "run", lines)
    ((_, values),) = curves(drawn("Training loss", run))
    assert [math.isnan(value) for value in values] == [epoch == 2 for epoch in EPOCHS]
    assert column(report(run), "training loss, nats")[2] == "—"
    assert curves(drawn("Bytes so far", run))[0][1][1:4] == pytest.approx([8.001, 8.001, 16.004])


@pytest.mark.parametrize("values", [(0, 0), (1e99, -1e99), (1, 1 + 2**-52), (1e-300, 2e-300), (5, None)])
def test_whatever_the_size_of_numbers_they_are_drawn(values: tuple, tmp_path: Path) -> None:
    epochs = (0, 2**53 - 1)
    lines = [line(0, train_loss=one, bytes_sent=one) | {"epoch": at} for at, one in zip(epochs, values, strict=True)]
    lines[1]["level"] = 1e-3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(figures(report(write(tmp_path / "run", lines)))) == len(SHOWN)


# Several runs


def test_runs_are_compared_in_the_same_figures(folder: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "two", [line(epoch, (2,) * 3, train_accuracy=0.3) for epoch in range(3)])
    figure = drawn("Training accuracy", folder, other)
    assert curves(figure)[1] == ([1, 2, 3], pytest.approx([30] * 3))
    colours = [one.get_color() for one in figure.axes[0].lines if one.get_marker() == "o"]
    assert colours == [drawing.colour(0), drawing.colour(1)]
    # A level that does not change is a line, and no surface.
    assert len(figure.axes[1].lines) == 5 and len(figure.axes[1].collections) == 4
    found = Page(report(folder, other))
    assert [row[0] for row in found.tables["summary"][1:]] == ["one", "two"]
    samples = [given["stroke"] for tag, given in found.elements if tag == "path" and "stroke" in given][:2]
    assert samples == colours, "the names have no sample of their curves"


def test_folders_of_the_same_name(tmp_path: Path) -> None:
    folders = [write(tmp_path / parent / "run", LINES) for parent in ("a", "b")]
    assert [run.name for run in read_runs([*folders, folders[0]])] == [str(folders[0]), str(folders[1])]


# Tables


def test_the_summary_is_that_of_the_run(text: str) -> None:
    head, row = Page(text).tables["summary"]
    cells = dict(zip(head, row, strict=False))
    assert cells["settings"] == "resnet8, digits, 2 workers, dynamic"
    assert cells["epochs"] == "6" and cells["levels, bits"] == "4, 8, 32, 8"
    assert cells["final test accuracy, %"] == "82.50" and cells["best (epoch)"] == "82.50 (6)"
    assert cells["sent per worker, MB"] == "64.02" and cells["% of float32"] == f"{100 * 64.015 / 192:.2f}"
    assert [cells["minutes"], cells["compute, minutes"], cells["exchange, minutes"]] == ["1.150", "0.5625", "0.2250"]


def test_of_a_long_ladder_both_ends_are_named(tmp_path: Path) -> None:
    lines = [line(0, level=2 + at, next_level=3 + at) | {"epoch": at} for at in range(8)]
    assert Page(report(write(tmp_path / "run", lines))).tables["summary"][1][3] == "2, 3, 4, …, 7, 8, 9"


def test_flags_that_differ_are_marked(folder: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "two", LINES, {**CONFIG, "levels": [2, 4]})
    found = Page(report(folder, other))
    rows = {row[0]: row[1:] for row in found.tables["flags"]}
    assert rows["levels"] == ["4,8", "2,4"] and rows["model"] == ["resnet8", "resnet8"]
    assert [attributes.get("class") for tag, attributes in found.elements if tag == "tr"].count("differs") == 1


# Runs under way


@pytest.mark.parametrize("half", ['{"epoch": 6, "level": 8, "train_lo', "[1", '"text"\n', "\x00\x00", "{" * 100_000])
def test_half_a_last_line_is_left_out(half: str, tmp_path: Path) -> None:
    whole, run = (
        read_run(write(tmp_path / name, LINES, after=after)) for name, after in (("whole", ""), ("run", half))
    )
    assert run.epochs == whole.epochs and run.cut_short and not whole.cut_short


def test_a_run_before_the_end_of_its_first_epoch(folder: Path, tmp_path: Path) -> None:
    young = write(tmp_path / "young", [])
    text = report(young)
    assert "young: no epoch is finished yet" in text and not figures(text) and "incomplete" not in text
    assert list(figures(report(young, folder))) == list(SHOWN)


def test_a_loop_of_ones_own_may_write_less(tmp_path: Path) -> None:
    """And other things."""
    lines = [{"epoch": at, "level": level, "train_loss": 1.5, "mine": ["x"]} for at, level in enumerate((2, 4))]
    run = write(tmp_path / "run", lines)
    assert list(figures(report(run))) == ["Training loss"]
    assert switch_lines(drawn("Training loss", run)) == [(1.5, "1")]  # the levels themselves say so
    assert "The level did not change." in report(write(tmp_path / "other", lines[:1]))


def test_numbers_that_cannot_be_drawn_are_missing(tmp_path: Path) -> None:
    losses = "NaN", "Infinity", "1e999", "1" + "0" * 400, "true", '"1"', "1e99"
    text = "".join(f'{{"epoch": {epoch}, "level": 4, "train_loss": {loss}}}\n' for epoch, loss in enumerate(losses))
    folder = write(tmp_path / "run", [], after=text)
    assert read_run(folder).values("train_loss") == [None] * 6 + [1e99]
    assert column(report(folder), "training loss, nats") == ["—"] * 6 + ["1.000e+99"]


# What is in the files stays text


HOSTILE = "</title></svg></style><script>alert(1)</script><img src=x onerror=alert(1)>"
HOSTILE += '" onload="alert(1)\' & \x00\x1b\ud800]]>-->'


def test_text_from_files_is_no_markup(tmp_path: Path) -> None:
    lines = [line(epoch, reason=HOSTILE) for epoch in EPOCHS]
    config = {HOSTILE: HOSTILE, **CONFIG, "model": HOSTILE, "levels": [HOSTILE], "world_size": {HOSTILE: [HOSTILE]}}
    name = HOSTILE.replace("/", "|").replace("\x00", "").replace("\ud800", "\udc80")  # a byte that is no UTF-8
    folder = write(tmp_path / name, lines, config)
    safe = write(tmp_path / "safe", LINES, {"key": "text", **CONFIG})
    text = report(folder)
    text.encode()
    hostile, harmless = Page(text), Page(report(safe))
    assert "alert(1)" in hostile.text and "onload=" in hostile.text
    shape = [(tag, sorted(attributes)) for tag, attributes in harmless.elements]
    assert [(tag, sorted(attributes)) for tag, attributes in hostile.elements] == shape
    assert figures(text).keys() == figures(report(safe)).keys()  # XML, whatever is in it


def test_nothing_is_fetched_and_nothing_runs(text: str) -> None:
    for tag, attributes in Page(text).elements:
        assert tag not in ("script", "iframe", "object", "img", "image", "foreignobject", "base", "form")
        for key, value in attributes.items():
            assert key not in ("src", "srcset", "action") and not key.startswith("on")
            assert not key.endswith("href") or value == "data:," or value.startswith("#")
    assert not re.search(r"url\((?!#)|@import", text)
    assert set(re.findall(r"\w+://[^\"]*", text)) == {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert "default-src 'none'" in text


# The command


def test_the_command_writes_a_page(folder: Path, tmp_path: Path, text: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder / 'report.html'}\n"
    assert main(["report", str(folder), str(folder), "--output", str(tmp_path / "page.html")]) == 0
    assert (folder / "report.html").read_text(encoding="utf-8") == text
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == text


def refused(capsys: pytest.CaptureFixture, *arguments: object) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["report", *map(str, arguments)])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1
    return said


def test_a_restart_replaces_the_epochs_that_it_repeats(tmp_path: Path) -> None:
    first, again = [line(epoch) for epoch in range(4)], [line(epoch, train_loss=9.0) for epoch in range(2, 4)]
    run = read_run(write(tmp_path / "run", [*first, *again]))
    assert [epoch.number for epoch in run.epochs] == [0, 1, 2, 3] and run.values("train_loss")[2:] == [9.0, 9.0]


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("{", "is not a JSON object"),
        ("", "is not a JSON object"),
        ("[1, 2]", "is not a JSON object"),
        ("{" * 100_000, "is not a JSON object"),
        ("\udcff\udcfe", "is not a JSON object"),
        ("{}", "'epoch'"),
        ('{"epoch": true, "level": 4}', "'epoch'"),
        ('{"epoch": -1, "level": 4}', "'epoch'"),
        ('{"epoch": 1}', "'level'"),
        ('{"epoch": 1, "level": 0}', "'level'"),
        ('{"epoch": 1, "level": "4"}', "'level'"),
        ('{"epoch": 1, "level": 4, "next_level": NaN}', "'next_level'"),
        ('{"epoch": 1, "level": 4, "reason": 5}', "'reason'"),
    ],
)
def test_a_bad_line_is_named(bad: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = write(tmp_path / "run", [])
    lines = [json.dumps(line(0)), bad, json.dumps(line(2))]
    (folder / "metrics.jsonl").write_text("\n".join(lines), encoding="utf-8", errors="surrogateescape")
    error = refused(capsys, folder)
    assert f"{folder / 'metrics.jsonl'}: line 2 " in error and said in error
    assert not (folder / "report.html").exists()


def test_files_that_are_not_there_or_no_files(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert f"{tmp_path / 'none' / 'metrics.jsonl'} is missing" in refused(capsys, folder, tmp_path / "none")
    assert "page.html cannot be written: " in refused(capsys, folder, "--output", tmp_path / "none" / "page.html")
    for content in ("{", "[]", '{"config": 5}'):
        (folder / "summary.json").write_text(content)
        assert f"{folder / 'summary.json'} is not the summary" in refused(capsys, folder)
    (folder / "summary.json").unlink()
    (folder / "summary.json").mkdir()
    assert f"{folder / 'summary.json'} cannot be read: " in refused(capsys, folder)
    (folder / "metrics.jsonl").unlink()
    (folder / "metrics.jsonl").mkdir()
    assert f"{folder / 'metrics.jsonl'} cannot be read: " in refused(capsys, folder)


def without(module: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """The command where a module is missing."""
    code = f"import sys, runpy; sys.modules['{module}'] = None; import hvd_dyncomp; "
    code += "sys.argv.insert(1, 'report'); runpy.run_module('hvd_dyncomp', run_name='__main__')"
    command = [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_where_matplotlib_is_missing_one_line_says_what_to_install(folder: Path) -> None:
    """Nothing else of the package needs it."""
    done = without("matplotlib", folder)
    error = "the report needs matplotlib: run 'pip install hvd_dyncomp[report]'"
    assert (done.returncode, done.stderr) == (2, f"python -m hvd_dyncomp report: error: {error}\n")
    assert without("matplotlib", "--help").returncode == 0


def snippet(name: str) -> str:
    """The code block of docs/runs.md that defines a function."""
    blocks = (ROOT / "docs" / "runs.md").read_text(encoding="utf-8").split("```")
    (found,) = [block for block in blocks if f"def {name}(" in block]
    return found.removeprefix("python\n")


def test_the_callback_of_the_page_is_enough(tmp_path: Path) -> None:
    meter = hvd_dyncomp.Meter()
    decided = [hvd_dyncomp.Record(0, bits=4, reason="up"), hvd_dyncomp.Record(1, bits=4, reason="hold")]
    names: dict = {"json": json}
    exec(snippet("write_line"), names)  # noqa: S102
    for level, record in zip((2, 4), decided, strict=True):
        meter.at(record.epoch, level).sent_bytes += 1e6 * level
        given = SimpleNamespace(history=[record]), SimpleNamespace(meter=meter)
        names["write_line"](tmp_path, level, *given, train_loss=1.0)
    text = report(tmp_path)
    assert column(text, "sent per worker in an epoch, MB") == ["2.000", "4.000"]
    assert Page(text).tables["switches"][1][2:] == ["1", "2", "4", "up"]


def test_the_scalars_of_the_page() -> None:
    written: dict = {}
    writer = SimpleNamespace(add_scalar=lambda name, value, step: written.update({name: (value, step)}), flush=int)
    names = {"SummaryWriter": lambda folder, purge_step: writer, "first_epoch": 0}
    exec(snippet("write_scalars").partition("SummaryWriter\n")[2], names)  # noqa: S102  # without the import
    meter = hvd_dyncomp.Meter()
    meter.at(3, 4).sent_bytes = 7
    quantizer = SimpleNamespace(meter=meter, controller=SimpleNamespace(bits=4))
    names["write_scalars"](3, quantizer, {"fc": 0.25}, train_loss=1.5)
    assert written == {
        "level": (4, 3),
        "bytes": (7, 3),
        "saved": (meter.total().saved_fraction, 3),
        "tensor_errors/fc": (0.25, 3),
        "train_loss": (1.5, 3),
    }
