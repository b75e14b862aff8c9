"""The page about training runs: its figures read off their own axes, its text, its errors."""

import ast
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from made_up_runs import LEVELS, REASONS, SVG, Page, axis, curve, figures, line, number, of_class, pieces, write

import hvd_dyncomp
from hvd_dyncomp.report import bars, drawing
from hvd_dyncomp.report.__main__ import main
from hvd_dyncomp.report.page import page
from hvd_dyncomp.report.runs import read_run, read_runs

ROOT = Path(__file__).parents[1]
EPOCHS = range(len(LEVELS))
LINES = [line(epoch) for epoch in EPOCHS]
CONFIG = {"model": "resnet8", "dataset": "digits", "world_size": 2, "epochs": 6, "compression": "dynamic"}
CONFIG |= {"policy": "step", "levels": [4, 8], "bits": 8}
CURVES = {
    "train-accuracy": [100 * one["train_accuracy"] for one in LINES],
    "test-accuracy": [100 * one["test_accuracy"] for one in LINES],
    "train-loss": [one["train_loss"] for one in LINES],
    "bytes": [one["bytes_sent"] / 1e6 for one in LINES],
    "bytes-so-far": [sum(one["bytes_sent"] for one in LINES[: epoch + 1]) / 1e6 for epoch in EPOCHS],
}


def report(*folders: Path) -> str:
    return page(read_runs(folders))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "one", LINES, CONFIG)


@pytest.fixture
def drawn(folder: Path) -> dict:
    return figures(report(folder))


# Figures


@pytest.mark.parametrize("key", CURVES)
def test_curves_have_the_values_of_the_run(key: str, drawn: dict) -> None:
    points = curve(drawn[key], "one")
    assert [epoch for epoch, _ in points] == pytest.approx([epoch + 1 for epoch in EPOCHS], abs=1e-3)
    assert [value for _, value in points] == pytest.approx(CURVES[key], rel=2e-3)
    assert pieces(drawn[key], "one") == [len(EPOCHS)]


@pytest.mark.parametrize("key", CURVES)
def test_levels_are_steps_behind_every_curve(key: str, drawn: dict) -> None:
    across, bits = axis(drawn[key], "x"), axis(drawn[key], "level")
    (group,) = of_class(drawn[key], "levels")
    steps = {}
    for box in group.iter(f"{SVG}rect"):
        first, last = (across(number(box, "x") + side * number(box, "width")) for side in (0, 1))
        assert box.get("fill") != "none"
        steps |= {epoch: bits(number(box, "y")) for epoch in range(round(first + 0.5), round(last + 0.5))}
    assert steps == pytest.approx({epoch + 1: level for epoch, level in zip(EPOCHS, LEVELS, strict=True)}, rel=0.01)


@pytest.mark.parametrize("key", CURVES)
def test_every_switch_is_a_line_with_its_number(key: str, drawn: dict) -> None:
    across = axis(drawn[key], "x")
    lines = of_class(drawn[key], "switch", "line")
    assert [across(number(one, "x1")) for one in lines] == pytest.approx([epoch + 1.5 for epoch in REASONS], abs=1e-3)
    assert [one.text for one in of_class(drawn[key], "switch", "text")] == ["1", "2", "3"]


def test_the_reasons_are_listed_once(folder: Path) -> None:
    text = report(folder)
    for reason in REASONS.values():
        assert text.count(reason) == len(CURVES) + 1, "in the tooltip of each figure, and in the table"
    rows = Page(text).tables["switches"][1:]
    assert [row[0] for row in rows] == ["1", "2", "3"]
    assert [row[2:] for row in rows] == [
        ["2", "4 bits", "8 bits", REASONS[1]],
        ["4", "8 bits", "32 bits", REASONS[3]],
        ["5", "32 bits", "8 bits", REASONS[4]],
    ]


def test_a_value_that_is_missing_interrupts_its_line(tmp_path: Path) -> None:
    lines = [line(epoch, **({"train_loss": None} if epoch == 2 else {})) for epoch in EPOCHS]
    drawn = figures(report(write(tmp_path / "run", lines)))
    assert pieces(drawn["train-loss"], "run") == [2, 3]
    assert [round(epoch) for epoch, _ in curve(drawn["train-loss"], "run")] == [1, 2, 4, 5, 6]
    assert pieces(drawn["test-accuracy"], "run") == [6]


def test_time_is_stacked(drawn: dict) -> None:
    across, up = axis(drawn["time-1"], "x"), axis(drawn["time-1"], "y")
    for key, below in ((bars.COMPUTE, None), (bars.EXCHANGE, bars.COMPUTE)):
        boxes = of_class(drawn["time-1"], key, "rect")
        assert len(boxes) == len(EPOCHS)
        for box, epoch in zip(boxes, LINES, strict=True):
            base = epoch[below] if below else 0.0
            assert across(number(box, "x") + number(box, "width") / 2) == pytest.approx(epoch["epoch"] + 1, abs=0.01)
            assert up(number(box, "y") + number(box, "height")) == pytest.approx(base, abs=0.02)
            assert up(number(box, "y")) == pytest.approx(base + epoch[key], abs=0.02)


def bytes_read(figure: object) -> dict[tuple[str, float], float]:
    """{(colour, level): MB}, by the lengths of the bars."""
    across = axis(figure, "x")
    return {
        (box.get("fill"), float(box.get("data-level"))): across(number(box, "x") + number(box, "width"))
        for box in of_class(figure, "bytes", "rect")
    }


def test_bytes_by_level(drawn: dict) -> None:
    read = {level: megabytes for (_, level), megabytes in bytes_read(drawn["bytes-by-level"]).items()}
    assert read == pytest.approx({4: 8.001, 8: 24.010, 32: 32.004}, rel=5e-3)


def test_bytes_of_an_epoch_at_several_levels_are_divided(tmp_path: Path) -> None:
    lines = [line(0, (4,), steps_by_level={"4": 30, "8": 5, "16": 0}, bytes_sent=16e6)]
    text = report(write(tmp_path / "run", lines))
    read = {level: megabytes for (_, level), megabytes in bytes_read(figures(text)["bytes-by-level"]).items()}
    assert read == pytest.approx({4: 12, 8: 4}, rel=5e-3)
    assert "divided by steps times bits" in text
    assert "divided" not in report(write(tmp_path / "other", LINES))


def test_bytes_are_those_that_leave_hosts_where_there_are_several(folder: Path, tmp_path: Path) -> None:
    hosts = {"hosts": 2, "bytes_leaving_host": 3e6, "bytes_float32_leaving_host": 24e6}
    several = write(tmp_path / "two", [line(epoch, **hosts) for epoch in EPOCHS])
    text = report(several)
    assert [value for _, value in curve(figures(text)["bytes"], "two")] == pytest.approx([3] * 6, rel=1e-3)
    head, row = Page(text).tables["summary"]
    assert row[head.index("left each host, MB") :][:2] == ["18", "12.5"]
    both = report(several, folder)
    assert curve(figures(both)["bytes"], "two")[0][1] == pytest.approx(4, rel=1e-3)
    assert "per worker" in both and "from each host" not in both
    assert "left each host" not in report(folder)


def test_figures_say_what_they_are(drawn: dict) -> None:
    """To those who cannot see them, too; ids that they refer to are there, once on the page."""
    assert {*CURVES, "bytes-by-level", "time-1"} == drawn.keys()
    ids = []
    for figure in drawn.values():
        title, described = figure.find(f"{SVG}title"), figure.find(f"{SVG}desc")
        assert figure.get("role") == "img" and title.text and described.text
        assert figure.get("aria-labelledby").split() == [title.get("id"), described.get("id")]
        assert of_class(figure, "title")[0].text == title.text
        assert all(one.text for one in of_class(figure, "label")) and len(of_class(figure, "label")) >= 2
        ids += [one.get("id") for one in figure.iter() if one.get("id")]
    assert len(ids) == len(set(ids)) == 3 * len(drawn)


# The scale of axes


NUMBERS = st.floats(-1e100, 1e100).map(lambda value: value if abs(value) > 1e-99 else 0.0)


@given(NUMBERS, NUMBERS)
@example(1.0, 1.0 + 2**-52)
@example(0.0, 0.0)
def test_ticks_enclose_the_values_and_are_few_and_apart(a: float, b: float) -> None:
    low, high = min(a, b), max(a, b)
    marks = drawing.ticks(low, high)
    slack = 1e-8 * max(abs(low), abs(high))
    assert marks[0] <= low + slack and high - slack <= marks[-1]
    assert 2 <= len(marks) <= 9
    assert all(before < after for before, after in zip(marks, marks[1:], strict=False))
    scale = drawing.Scale(marks[0], marks[-1], 300, 30)
    assert 29 <= scale(high) <= scale(low) <= 301
    assert len(set(drawing.labels(marks))) == len(marks) or slack > 1e-3 * (marks[1] - marks[0])


# Several runs


def test_runs_are_compared_in_the_same_figures(folder: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "two", [line(epoch, (2,) * 3, train_accuracy=0.3) for epoch in range(3)])
    text = report(folder, other)
    drawn = figures(text)
    assert [value for _, value in curve(drawn["train-accuracy"], "one")] == pytest.approx(
        CURVES["train-accuracy"], rel=2e-3
    )
    assert curve(drawn["train-accuracy"], "two") == [pytest.approx((epoch, 30), rel=2e-3) for epoch in (1, 2, 3)]
    for key in CURVES:
        groups = {group.get("data-run"): group for group in of_class(drawn[key], "curve")}
        strokes = {name: group.find(f"{SVG}polyline").get("stroke") for name, group in groups.items()}
        assert strokes == {"one": drawing.colour(0), "two": drawing.colour(1)}
        shown = ["".join(one.itertext()) for one in of_class(drawn[key], "legend")]
        assert shown == ["oneone", "twotwo"]  # each with its tooltip
        # A level that does not change is a line, and no surface.
        fills = {
            g.get("data-run"): {box.get("fill") for box in g.iter(f"{SVG}rect")} for g in of_class(drawn[key], "levels")
        }
        assert fills == {"one": {drawing.colour(0)}, "two": {"none"}}
    assert bytes_read(drawn["bytes-by-level"])[drawing.colour(1), 2] == pytest.approx(6.003, rel=5e-3)
    assert {"time-1", "time-2"} <= drawn.keys()
    assert axis(drawn["time-1"], "y")(100) == axis(drawn["time-2"], "y")(100)
    assert [row[0] for row in Page(text).tables["summary"][1:]] == ["one", "two"]


def test_runs_are_told_apart() -> None:
    """By colour and line style, up to 49 of them; and by name."""
    assert len({(drawing.colour(run), drawing.dash(run)) for run in range(49)}) == 49
    assert len({drawing.colour(run) for run in range(7)}) == 7


def test_folders_of_the_same_name(tmp_path: Path) -> None:
    folders = [write(tmp_path / parent / "run", LINES) for parent in ("a", "b")]
    names = [run.name for run in read_runs([*folders, folders[0]])]
    assert names == [str(folders[0]), str(folders[1]), f"{folders[0]} (2)"]


# Tables


def test_the_summary_is_that_of_the_run(folder: Path) -> None:
    head, row = Page(report(folder)).tables["summary"]
    cells = dict(zip(head, row, strict=False))
    assert cells["settings"] == "resnet8, digits, 2 workers, dynamic, policy step, levels 4,8"
    assert cells["epochs"] == "6" and cells["levels, bits"] == "4, 8, 32, 8"
    assert cells["final test accuracy, %"] == cells["best (epoch)"].partition(" ")[0] == "82.50"
    assert cells["best (epoch)"] == "82.50 (6)"
    assert cells["sent per worker, MB"] == "64"
    assert cells["% of float32"] == f"{100 * 64.015 / 192:.1f}"
    assert [cells["minutes"], cells["compute, minutes"], cells["exchange, minutes"]] == ["1.15", "0.56", "0.23"]


def test_the_best_epoch_is_the_first_of_them(tmp_path: Path) -> None:
    lines = [line(epoch, test_accuracy=(0.5, 0.9, 0.9, None)[epoch]) for epoch in range(4)]
    row = Page(report(write(tmp_path / "run", lines))).tables["summary"][1]
    assert row[4:6] == ["—", "90.00 (2)"]


def test_flags_that_differ_are_marked(folder: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "two", LINES, {**CONFIG, "levels": [2, 4]})
    found = Page(report(folder, other))
    rows = {row[0]: row[1:] for row in found.tables["flags"]}
    assert rows["levels"] == ["4,8", "2,4"] and rows["model"] == ["resnet8", "resnet8"]
    assert [attributes.get("class") for tag, attributes in found.elements if tag == "tr"].count("differs") == 1


# Runs under way


@pytest.mark.parametrize("half", ['{"epoch": 6, "level": 8, "train_lo', "[1", '"text"\n', "\x00\x00", "{" * 100_000])
def test_half_a_last_line_is_left_out(half: str, tmp_path: Path) -> None:
    text = report(write(tmp_path / "run", LINES, after=half))
    assert len(curve(figures(text)["train-loss"], "run")) == 6
    assert "is incomplete" in text and "is incomplete" not in report(write(tmp_path / "other", LINES))


def test_a_run_before_the_end_of_its_first_epoch(folder: Path, tmp_path: Path) -> None:
    young = write(tmp_path / "young", [])
    text = report(young)
    assert "no epoch is finished yet" in text and not figures(text)
    assert curve(figures(report(young, folder))["train-loss"], "one")


def test_a_run_of_one_epoch(tmp_path: Path) -> None:
    drawn = figures(report(write(tmp_path / "run", LINES[:1], {**CONFIG, "epochs": 12})))
    group = of_class(drawn["train-accuracy"], "curve")[0]
    assert len(list(group.iter(f"{SVG}circle"))) == 1 and not list(group.iter(f"{SVG}polyline"))
    assert Page(report(tmp_path / "run")).tables["summary"][1][2] == "1 of 12"


def test_what_has_been_decided_last_is_a_switch_already(tmp_path: Path) -> None:
    text = report(write(tmp_path / "run", LINES[:2]))
    assert Page(text).tables["switches"][1][2:] == ["2", "4 bits", "8 bits", REASONS[1]]
    assert len(of_class(figures(text)["bytes"], "switch", "line")) == 1


def test_a_loop_of_ones_own_may_write_less(tmp_path: Path) -> None:
    lines = [{"epoch": epoch, "level": level, "train_loss": 1.5} for epoch, level in enumerate((2, 4))]
    drawn = figures(report(write(tmp_path / "run", lines)))
    assert drawn.keys() == {"train-loss"}
    assert len(of_class(drawn["train-loss"], "switch", "line")) == 1  # the levels themselves say so


def test_numbers_that_cannot_be_drawn_are_missing(tmp_path: Path) -> None:
    losses = "NaN", "Infinity", "1e999", "1" + "0" * 400, "true", '"1"', "1e99"
    text = "".join(f'{{"epoch": {epoch}, "level": 4, "train_loss": {loss}}}\n' for epoch, loss in enumerate(losses))
    folder = write(tmp_path / "run", [], after=text)
    assert read_run(folder).values("train_loss") == [None] * 6 + [1e99]
    assert len(of_class(figures(report(folder))["train-loss"], "curve")[0]) == 1


# What is in the files stays text


HOSTILE = "</title></svg></style><script>alert(1)</script><img src=x onerror=alert(1)>"
HOSTILE += '" onload="alert(1)\' & \x00\x1b\ud800]]>-->'


def test_text_from_files_is_no_markup(tmp_path: Path) -> None:
    lines = [line(epoch, reason=HOSTILE, tensor_errors={HOSTILE: 4}) for epoch in EPOCHS]
    config = {HOSTILE: HOSTILE, **CONFIG, "model": HOSTILE, "levels": [HOSTILE], "world_size": {HOSTILE: [HOSTILE]}}
    name = HOSTILE.replace("/", "|").replace("\x00", "").replace("\ud800", "\udc80")  # a byte that is no UTF-8
    folder = write(tmp_path / name, lines, config)
    harmless_lines = [line(epoch, tensor_errors={"name": 4}) for epoch in EPOCHS]
    safe = write(tmp_path / "safe", harmless_lines, {"key": "text", **CONFIG})
    text = report(folder)
    text.encode()
    hostile, harmless = Page(text), Page(report(safe))
    assert "alert(1)" in hostile.text and "onload=" in hostile.text
    shape = [(tag, sorted(attributes)) for tag, attributes in harmless.elements]
    assert [(tag, sorted(attributes)) for tag, attributes in hostile.elements] == shape
    assert figures(text).keys() == figures(report(safe)).keys()  # XML, whatever is in it


def test_nothing_is_fetched_and_nothing_runs(folder: Path) -> None:
    text = report(folder)
    allowed = {"xmlns": {"http://www.w3.org/2000/svg"}, "href": {"data:,", "#switches"}}
    for tag, attributes in Page(text).elements:
        assert tag not in ("script", "iframe", "object", "img", "image", "use", "foreignobject")
        for key, value in attributes.items():
            assert key not in ("src", "srcset", "xlink:href") and not key.startswith("on")
            assert value in allowed.get(key, {value})
    assert (
        "url(" not in text and "@import" not in text and text.count("://") == text.count("http://www.w3.org/2000/svg")
    )


# The command


def test_the_command_writes_a_page(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main([str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder / 'report.html'}\n"
    assert main([str(folder), str(folder), "--output", str(tmp_path / "page.html")]) == 0
    assert (folder / "report.html").read_text(encoding="utf-8") == report(folder)
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == report(folder, folder)


def refused(capsys: pytest.CaptureFixture, *arguments: object) -> str:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1
    return said


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
        ('{"epoch": 0, "level": 4}', "has epoch 0 after epoch 0"),
        ('{"epoch": 1}', "'level'"),
        ('{"epoch": 1, "level": 0}', "'level'"),
        ('{"epoch": 1, "level": "4"}', "'level'"),
        ('{"epoch": 1, "level": 4, "next_level": NaN}', "'next_level'"),
        ('{"epoch": 1, "level": 4, "reason": 5}', "'reason'"),
        ('{"epoch": 1, "level": 4, "steps_by_level": [1]}', "'steps_by_level'"),
        ('{"epoch": 1, "level": 4, "steps_by_level": {"four": 1}}', "'steps_by_level'"),
        ('{"epoch": 1, "level": 4, "tensor_errors": {"fc": -1}}', "'tensor_errors'"),
        ('{"epoch": 1, "level": 4, "tensor_errors": {"fc": "x"}}', "'tensor_errors'"),
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


def test_horovod_is_not_needed(folder: Path) -> None:
    code = (
        "import sys, runpy; sys.modules['horovod'] = None; runpy.run_module('hvd_dyncomp.report', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (folder / "report.html").exists()


def test_the_standard_library_is_enough() -> None:
    for path in (Path(hvd_dyncomp.__file__).parent / "report").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                known = name.startswith("hvd_dyncomp.report") or name.partition(".")[0] in sys.stdlib_module_names
                assert known, f"{path} imports {name}"


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
        meter.at(record.epoch, level).compressed_bytes += 1e6 * level
        given = SimpleNamespace(history=[record]), SimpleNamespace(meter=meter)
        names["write_line"](tmp_path, level, *given, train_loss=1.0)
    text = report(tmp_path)
    points = curve(figures(text)["bytes"], tmp_path.name)
    assert points == [pytest.approx((1, 2), rel=5e-3), pytest.approx((2, 4), rel=5e-3)]
    assert Page(text).tables["switches"][1][2:] == ["1", "2 bits", "4 bits", "up"]


def test_the_scalars_of_the_page() -> None:
    written: dict = {}
    writer = SimpleNamespace(add_scalar=lambda name, value, step: written.update({name: (value, step)}), flush=int)
    names = {"SummaryWriter": lambda folder, purge_step: writer, "first_epoch": 0}
    exec(snippet("write_scalars"), names)  # noqa: S102
    meter = hvd_dyncomp.Meter()
    meter.at(3, 4).compressed_bytes = 7
    quantizer = SimpleNamespace(meter=meter, controller=SimpleNamespace(bits=4), relative_errors=lambda: {"fc": 0.25})
    names["write_scalars"](3, quantizer, train_loss=1.5)
    assert written == {
        "level": (4, 3),
        "bytes": (7, 3),
        "saved": (meter.total().saved_fraction, 3),
        "tensor_errors/fc": (0.25, 3),
        "train_loss": (1.5, 3),
    }
