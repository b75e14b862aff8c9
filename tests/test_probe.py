"""`python -m hvd_dyncomp probe`, without ranks: shapes, arguments, and what it makes of figures."""

import argparse

import pytest

from hvd_dyncomp.__main__ import main
from hvd_dyncomp.commands.probe import command, findings, turns
from hvd_dyncomp.commands.probe.findings import Row, advice
from hvd_dyncomp.commands.probe.tensors import MODELS, count, evenly, shapes_of

# As torchvision and Hugging Face publish them; the embeddings of GPT-2 are used twice.
PUBLISHED = {
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
    "vit-b-16": 86_567_656,
    "bert-base": 109_482_240,
    "bert-large": 335_141_888,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
}


def exactly(ms: float, megabytes: float | None = None) -> Row:
    return Row(ms, ms - 1, ms + 1, megabytes)


def test_models_have_as_many_values_as_published():
    assert {model: count(shapes_of(model)) for model in MODELS} == PUBLISHED


@pytest.mark.parametrize("values", [1, 2**20, 2**20 + 1, 3_000_000])
def test_values_without_a_model(values):
    assert count(evenly(values)) == values and min(count([shape]) for shape in evenly(values)) > 0


@pytest.mark.parametrize(("text", "values"), [("25.6M", 25_600_000), ("1b", 10**9), ("20k", 20_000), ("7", 7)])
def test_numbers_of_values(text, values):
    assert command._values(text) == values


@pytest.mark.parametrize(
    ("read", "text"),
    [
        *(("values", "2x"), ("values", "0"), ("positive", "inf")),
        ("new_file", "/missing/a.json"),
    ],
)
def test_bad_arguments_are_named(read, text):
    with pytest.raises(argparse.ArgumentTypeError, match=f"^'{text}' is not"):
        getattr(command, f"_{read}")(text)


def test_one_rank_is_refused(capsys, monkeypatch):
    monkeypatch.setattr(command, "processes", lambda: 1)
    assert main(["probe"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("hvd_dyncomp probe: error: one rank exchanges nothing: start one for each GPU")


def test_rows_are_what_steps_take_longer_than_without_an_exchange():
    measured = {
        "alone": {"ms": [9.0, 10.0, 11.0], "sent": [[0, 0]] * 3},
        "ddp": {"ms": [30.0, 20.0, 40.0], "sent": [[2_000_000, 4_000_000], [3_000_000, 3_000_000], [0, 0]]},
        "4bit-ddp": {"ms": [12.0], "sent": []} | {"ms": [12.0, 12.0, 15.0]},
    }
    assert findings.rows(measured) == {"ddp": Row(20.0, 15.0, 25.0, 3.0), "4bit-ddp": Row(2.0, 2.0, 3.5, None)}


def test_the_table_compares_with_the_fastest_of_the_frameworks_own():
    found = {"ddp": exactly(80, 102.4), "ddp-bf16": exactly(40, 51.2), "powersgd1": exactly(10, 0.5)}
    lines = findings.table({**found, "4bit-ddp": exactly(20, 13)}).splitlines()
    assert [line.split()[-1] for line in lines[1:5]] == ["0.50", "1.00", "4.00", "2.00"]
    assert "DDP bf16 hook" in lines[5] and "102.40" in lines[1]


def test_where_it_pays():
    found = {"ddp": exactly(800), "ddp-bf16": exactly(400), "8bit-ddp": exactly(200), "4bit-ddp": exactly(100)}
    assert advice(found) == (
        "At 4 bits the exchange adds 100 ms to a step, in place of 400 ms: a step that waits for the network gets up "
        "to 300 ms shorter."
    )
    assert "a step gets 300 ms shorter" in advice(found, backward_ms=50)
    assert "0.25 bit would add 30 ms, and needs" in advice({**found, "0.25bit-ddp": exactly(30)})
    assert "0.25 bit" not in advice({**found, "0.25bit-ddp": exactly(90)})
    assert "PowerSGD, rank 1, would add 20 ms" in advice({**found, "powersgd1": exactly(20)})


@pytest.mark.parametrize("ours", [exactly(400), exactly(500), Row(410, 200, 500, None)])
def test_where_there_is_nothing_to_gain(ours):
    found = {"none": exactly(800), "fp16": exactly(400), "4bit": ours}
    assert advice(found) == "Nothing to gain at 4 bits: Horovod fp16 is as fast, or faster."
    assert "1 bit would save 300 ms, and needs" in advice({**found, "1bit": exactly(100)})


@pytest.mark.parametrize("ours", [exactly(398.5), exactly(390), Row(300, 200, 399, None), Row(399.9, 390, 450, None)])
def test_a_gain_that_may_be_noise_is_not_called_none(ours):
    """Quartiles that touch, or less than 5 %."""
    said = advice({"none": exactly(800), "fp16": exactly(400), "4bit": ours})
    assert said.startswith("No sure gain at 4 bits: the exchange adds ")
    assert said.endswith(" ms to a step, in place of 400 ms, which is not surely faster than Horovod fp16.")


@pytest.mark.parametrize(
    ("level", "words"),
    [
        ("3", "3 bits would {}."),
        ("2", "2 bits would {}, and need less momentum (docs/levels.md)."),
        ("1", "1 bit would {}, and needs less momentum (docs/levels.md)."),
        ("0.5", "0.5 bit would {}, and needs less momentum, and a learning rate that is warmed up"),
        ("0.125", "0.125 bit would {}, and needs less momentum, and a learning rate that is warmed up"),
    ],
)
def test_each_level_is_said_to_need_what_it_needs(level, words):
    faster = {"ddp": exactly(800), "4bit-ddp": exactly(300), f"{level}bit-ddp": exactly(100)}
    assert words.format("add 100 ms") in advice(faster)
    slower = {**faster, "4bit-ddp": exactly(900)}
    assert words.format("save 700 ms") in advice(slower)


def test_a_low_level_that_is_judged_for_want_of_others_is_said_to_need_something():
    assert advice({"ddp": exactly(800), "2bit-ddp": exactly(100)}).endswith(
        "gets up to 700 ms shorter. 2 bits need less momentum (docs/levels.md)."
    )
    assert "need" not in advice({"ddp": exactly(800), "3bit-ddp": exactly(100)})


def test_times_that_noise_makes_negative_are_said_to_be_none():
    said = advice({"ddp": exactly(20), "4bit-ddp": exactly(-3)})
    assert "adds 0.00 ms to a step, in place of 20 ms" in said and "up to 20 ms shorter" in said
    for plain, ours in ((-1, -9), (-1, 5), (0, 0)):
        rows = {"ddp": exactly(plain), "4bit-ddp": exactly(ours), "0.25bit-ddp": exactly(ours)}
        assert "-" not in advice(rows) and "shorter" not in advice(rows) and "save" not in advice(rows)
        assert all(line.split()[-1] == "-" for line in findings.table(rows).splitlines()[1:4])


def test_without_the_recommended_level_the_highest_is_judged():
    found = {"none": exactly(800), "16bit": exactly(500), "0.5bit": exactly(600)}
    assert advice(found).startswith("At 16 bits the exchange adds 500 ms")


def test_the_link():
    assert findings.link({"ddp": exactly(800, 100)}, [0.3, 0.2, 9.0]) == (
        "The float32 exchange sends 1.00 Gbit/s from each host; 0.30 ms for an allreduce of one value."
    )
    assert findings.link({"none": exactly(800)}, [1.0]).startswith("No network interface carries the exchange")


@pytest.mark.parametrize("row", [Row(0, 0, 0, 100), Row(-0.2, -1, 1, 100), Row(0.3, -0.1, 0.5, 100)])
def test_an_exchange_of_no_measurable_time_gives_no_rate(row):
    said = findings.link({"ddp": row}, [0.3])
    assert said.startswith("The float32 exchange takes no time that can be told from noise") and "Gbit/s" not in said
    assert said.endswith("0.30 ms for an allreduce of one value.")


@pytest.mark.parametrize(
    ("values", "tensors", "words"),
    [
        (25_557_032, 161, "25.6 million values in 161 tensors"),
        (20_000, 1, "20,000 values in 1 tensor"),
        (1, 1, "1 value in 1 tensor"),
    ],
)
def test_how_much_is_exchanged(values, tensors, words):
    assert findings.size(values, tensors) == words


def test_the_interface_that_sends_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(turns, "_INTERFACES", tmp_path)
    for name in ("lo", "eth0", "ib0"):
        (tmp_path / name / "statistics").mkdir(parents=True)
        (tmp_path / name / "statistics" / "tx_bytes").write_text("100")

    def work() -> None:
        for name, sent in {"lo": 9000, "eth0": 150, "ib0": 1100}.items():
            (tmp_path / name / "statistics" / "tx_bytes").write_text(str(sent))

    counter = turns.busiest(work, 1000)
    assert counter is not None and counter() == 1100
    assert turns.busiest(work, 1) is None  # nothing more was sent
