"""The screening of ways to send few bits: what is sent, what is owed, and what is written down."""

import json
from dataclasses import replace

import pytest
import torch

from common.errors import RunError
from hvd_dyncomp import kernels
from screening import aggregation, codec, comparators, feedback, results, text
from screening import program as screen
from screening.allocation import LOST, OBJECTIVES, allocate
from screening.contenders import CONTENDERS, Contender
from screening.feedback import Way
from screening.tasks import TASKS, Task, prepare
from screening.trainer import train
from studies import program

SHAPES = [torch.Size((40, 30)), torch.Size((64, 32))]


def gradients(workers: int, seed: int = 0) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(shape.numel(), generator=generator) for shape in SHAPES] for _ in range(workers)]


@pytest.mark.parametrize("bits", codec.LEVELS)
def test_a_level_takes_the_bytes_that_it_says(bits: float) -> None:
    scale = 2 if bits < 1 else 4
    assert codec.block_bytes(bits) == scale + 512 * bits / 8


@pytest.mark.parametrize("bits", [1 / 8, 1 / 2, 1, 2, 4, 8])
def test_a_sender_is_the_library(bits: float) -> None:
    sender, residual = feedback.Sender([1300]), torch.zeros(1536)
    for step in range(4):
        gradient = torch.randn(1300, generator=torch.Generator().manual_seed(step))
        [arrived], sent = sender.send([gradient], {Way(bits): [0]}, step)
        message = torch.empty(3 * kernels.block_bytes(bits, 512), dtype=torch.uint8)
        kernels.encode_into(message, [gradient], residual, bits=bits, block_size=512)
        expected = torch.empty(1300)
        kernels.decode_into([expected], [message], bits=bits, block_size=512)
        assert sent == message.numel()
        torch.testing.assert_close(arrived, expected)
        torch.testing.assert_close(sender.residuals[0], residual[:1300])


@pytest.mark.parametrize("way", [Way(1 / 8, bound=99), Way(1, 4, bound=99), Way(2, bound=99)])
def test_nothing_is_lost(way: Way) -> None:
    sender = feedback.Sender([700, 600])
    given, got = torch.zeros(700), torch.zeros(700)
    for step in range(9):
        tensors = [torch.randn(size, generator=torch.Generator().manual_seed(step)) for size in (700, 600)]
        given += tensors[0]
        got += sender.send(tensors, {way: [0], Way(8): [1]}, step)[0][0]
    torch.testing.assert_close(got + sender.residuals[0], given, rtol=1e-4, atol=1e-4)


def test_blocks_take_turns() -> None:
    sender, sent = feedback.Sender([5 * 512]), 0
    for step in range(4):
        [arrived], payload = sender.send([torch.ones(5 * 512)], {Way(1, 4, bound=8): [0]}, step)
        there = arrived.view(5, 512).ne(0).all(1)
        assert there.tolist() == [(block + step) % 4 == 0 for block in range(5)]
        assert (arrived.view(5, 512)[there].mean(1) <= step + 1).all()
        sent += payload
    assert sent == 5 * codec.block_bytes(1)


def test_what_is_owed_is_bounded() -> None:
    huge, small = torch.full((512,), 1e4), torch.ones(512)
    x, waits = feedback.bounded_sum(torch.cat([small, torch.zeros(512)]), torch.cat([huge, huge]), 2.0)
    torch.testing.assert_close(x[:512], torch.full((512,), 3.0))
    assert waits.tolist() == [False, True]
    for way in (Way(1), Way(1, bound=9), Way(1, 4)):
        arrived, owed, _ = feedback.feed(torch.zeros(512), huge, way, 0)
        assert not arrived.any() and owed.equal(huge)


@pytest.mark.parametrize(("workers", "values"), [(2, 4), (3, 2)])
def test_the_sum_of_more_than_two_is_quantized_once_more(workers: int, values: int) -> None:
    exchange = comparators.aggregator(CONTENDERS["1"], [torch.Size((512,))], workers, 0)
    exchange.new_epoch()
    exchange.new_step(0.0, 1.0)
    generator = torch.Generator().manual_seed(0)
    [mean] = exchange.mean([[torch.randn(512, generator=generator)] for _ in range(workers)])
    assert len(mean.unique()) == values


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("budget", [1 / 8, 1 / 4, 0.6, 1, 3])
def test_levels_are_within_the_budget(objective: str, budget: float) -> None:
    sizes, energies = [5000, 20000, 3000, 100000], [1.0, 1e-3, 10.0, 1e-5]
    levels = allocate(sizes, energies, budget, objective=objective, floors=[1 / 8] * 4)
    assert set(levels) <= set(LOST)
    assert sum(n * level for n, level in zip(sizes, levels, strict=True)) <= budget * sum(sizes) * (1 + 1e-9)


def test_bits_go_where_the_error_is() -> None:
    sizes, floors = [10000] * 3, [1 / 8, 1 / 8, 1]
    levels = allocate(sizes, [1.0, 1e-4, 1e-6], 1.5, objective="error", floors=floors)
    assert levels[0] > 1 and levels[1] < 1 and levels[2] == 1
    harm = OBJECTIVES["error"]
    spent = sum(harm(n, e, LOST[level]) for n, e, level in zip(sizes, [1.0, 1e-4, 1e-6], levels, strict=True))
    assert spent < sum(harm(n, e, LOST[1]) for n, e in zip(sizes, [1.0, 1e-4, 1e-6], strict=True)) / 3


@pytest.mark.parametrize(
    "name", ["uncompressed", "2", "1/4", "1/4 turns", "1/4 whiten", "PowerSGD rank 4", "top-k 1/2", "random-k 1"]
)
@pytest.mark.parametrize("workers", [2, 3])
def test_what_arrives_in_many_steps_is_the_mean(name: str, workers: int) -> None:
    exchange = comparators.aggregator(replace(CONTENDERS[name], bound=1000), SHAPES, workers, 0)
    own, arrived = gradients(workers), torch.zeros(SHAPES[0].numel())
    exchange.new_epoch()
    for step in range(300):
        exchange.new_step(step / 300, 1.0)
        arrived += exchange.mean(own)[0]
    mean = torch.stack([one[0] for one in own]).mean(0)
    assert (arrived / 300 - mean).norm() < 0.15 * mean.norm()


def test_values_of_very_different_size_arrive_where_they_are_whitened() -> None:
    sizes = 10.0 ** torch.arange(-3, 1).repeat(300)
    errors = {}
    for name in ("1", "1 whiten"):
        exchange, generator = comparators.aggregator(CONTENDERS[name], SHAPES[:1], 2, 0), torch.Generator()
        exchange.new_epoch()
        error = torch.zeros(1200)
        for step in range(400):
            exchange.new_step(step / 400, 1.0)
            own = [[sizes * torch.randn(1200, generator=generator.manual_seed(step))]] * 2
            if step >= 300:
                error += (exchange.mean(own)[0] - own[0][0]).square()
            else:
                exchange.mean(own)
        errors[name] = float((error / sizes**2).mean())
    assert errors["1 whiten"] < errors["1"] / 100


def test_natural_compression_is_unbiased() -> None:
    exchange = comparators.aggregator(CONTENDERS["natural"], SHAPES, 2, 0)
    own = gradients(2)
    mean = torch.stack([exchange.mean(own)[0] for _ in range(400)]).mean(0)
    expected = torch.stack([one[0] for one in own]).mean(0)
    assert (mean - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("uncompressed", 32),
        ("1/4", 0.25 + 16 / 512),
        ("1/4 turns", 0.25 + 32 / 512 / 4),
        ("2", 2 + 32 / 512),
        ("top-k 1/4", 0.25),
        ("random-k 1/4", 0.25),
        ("PowerSGD rank 1", 32 * (64 + 64 + 64 + 32) / (64 * 64 + 64 * 32)),
        ("natural", 9),
    ],
)
def test_bits_are_those_of_the_wire(name: str, bits: float) -> None:
    shapes = [torch.Size((64, 64)), torch.Size((64, 32))]  # whole blocks
    exchange = comparators.aggregator(CONTENDERS[name], shapes, 2, 0)
    own = [[torch.randn(shape.numel()) for shape in shapes] for _ in range(2)]
    exchange.new_epoch()
    for step in range(4):
        exchange.new_step(step / 4, 1.0)
        exchange.mean(own)
    header = 8 * codec.HEADER_BYTES / 6144 if CONTENDERS[name].method == "quantized" else 0
    assert exchange.traffic.bits == pytest.approx(bits + header, abs=2e-3)


def test_a_schedule_changes_the_level() -> None:
    contender = Contender("x", budget=((0.0, 2), (0.5, 1 / 4)), ends=4)
    exchange = aggregation.Quantized(contender, [*SHAPES, torch.Size((32, 64))], 2)
    exchange.new_epoch()
    exchange.new_step(0.49, 1.0)
    assert {way.bits: members for way, members in exchange.groups.items()} == {4: [0, 2], 2: [1]}
    exchange.new_step(0.5, 1.0)
    assert {way.bits: members for way, members in exchange.groups.items()} == {4: [0, 2], 1 / 4: [1]}


def tiny(**more) -> Task:
    return Task("tiny", **{"model": "mlp", "data": "digits", "limit": 256, "half_size": False, "epochs": 2, **more})


@pytest.mark.parametrize("name", ["uncompressed", "1/2 error", "1/4 mask", "1/8 follow", "1 whiten", "top-k 1/2"])
def test_a_run_learns_and_can_be_repeated(name: str, tmp_path) -> None:
    task = tiny(epochs=6)
    work = prepare(task, tmp_path)
    runs = [train(task, work, CONTENDERS[name], seed=1) for _ in range(2)]
    assert [run.pop("seconds") >= 0 for run in runs] == [True, True]
    assert runs[0] == runs[1] and len(runs[0]["curve"]) == 6
    assert runs[0]["score"] > 50, runs[0]["score"]
    assert runs[0]["bits"] < runs[0]["all_bits"] <= 32 or name == "uncompressed"


@pytest.mark.parametrize("task", [tiny(model="resnet8"), tiny(model="transformer", data="docstrings", limit=20000)])
def test_other_models_are_trained(task: Task, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("screening.tasks.STEPS", 4)
    found = train(task, prepare(task, tmp_path), CONTENDERS["1"], seed=0)
    assert 0 <= found["score"] <= 100 and 1 < found["bits"] < 1.2


def test_momentum_that_is_sent_uncompressed_changes_nothing(tmp_path) -> None:
    task = tiny(weight_decay=0.01)
    work = prepare(task, tmp_path)
    plain, sent = (train(task, work, Contender("x", "uncompressed", momentum=here), seed=0) for here in (None, 0.9))
    assert plain["loss"] == pytest.approx(sent["loss"], rel=1e-3)


def test_without_momentum_an_optimizer_that_has_it_steps_as_one_that_has_none() -> None:
    exchange = comparators.aggregator(CONTENDERS["uncompressed flat"], SHAPES[:1], 2, 0)
    ways = [torch.zeros(SHAPES[0].numel(), requires_grad=True) for _ in range(2)]
    optimizers = [torch.optim.SGD([ways[0]], lr=0.1, momentum=0.9), torch.optim.SGD([ways[1]], lr=1.0)]
    for step in range(5):
        own = gradients(2, seed=step)
        ways[0].grad = exchange.mean([one[:1] for one in own])[0]
        ways[1].grad = (own[0][0] + own[1][0]) / 2
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ways[0], ways[1])


@pytest.mark.parametrize("name", ["1/4 momentum", "1/4 momentum .5", "1/4 flat", "1/4 mask", "1 momentum"])
def test_momentum_that_is_sent_adds_up_to_what_the_optimizer_would_have_made_of_it(name: str) -> None:
    contender = replace(CONTENDERS[name], bound=1000)
    exchange = comparators.aggregator(contender, SHAPES[:1], 2, 0)
    exchange.new_epoch()
    first, weight = gradients(2), torch.zeros(SHAPES[0].numel(), requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.9)
    for step in range(400):  # one gradient, and then next to none
        exchange.new_step(step / 400, 1.0)
        weight.grad = exchange.mean([[one[0] if step == 0 else 1e-3 * one[0]] for one in first])[0]
        optimizer.step()
    sent = -weight.detach() / 10
    mean = (first[0][0] + first[1][0]) / 2 * (1 + 0.4)
    assert ((sent - mean).norm() < 0.2 * mean.norm()) == ("mask" not in name)


def test_what_is_tracked_is_known_better_with_every_step() -> None:
    way, sender, gradient = Way(1 / 8, track=True), feedback.Sender([1024]), torch.randn(1024)
    errors = [float((sender.send([gradient], {way: [0]}, step)[0][0] - gradient).norm()) for step in range(300)]
    assert errors[299] < 0.1 * errors[0] and errors[99] < errors[9] < errors[0]


def test_docstrings_are_the_same_every_time(tmp_path) -> None:
    (tmp_path / "b.py").write_text('"""Second."""')
    (tmp_path / "a.py").write_text('"""First: é."""\n\n\ndef f():\n    """Third."""\n')
    said = "".join(chr(number + 31) if number else "\n" for number in text.docstrings(99, tmp_path).tolist())
    assert said == "First: .\nThird.\nSecond.\n"
    assert text.docstrings(1000).equal(text.docstrings(1000)) and len(text.docstrings(1000)) == 1000


def test_runs_that_are_there_are_not_repeated(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setitem(TASKS, "tiny", tiny())
    path = tmp_path / "runs.jsonl"
    flags = ["--simulate", "screen", *["--tasks", "tiny", "--results", str(path), "--seeds", "2"]]
    program.main([*flags, "--contenders", "uncompressed;1"])
    assert capsys.readouterr().out.count("\ntiny, ") == 3 and path.read_text().count("\n") == 4
    with path.open("a") as file:
        file.write('{"task": "ti')  # killed while it wrote
    program.main([*flags, "--contenders", "uncompressed;1;1/4 t*s"])
    shown = capsys.readouterr().out.splitlines()
    assert [line.split(",")[1].strip() for line in shown[:2]] == ["1/4 turns"] * 2
    assert [line.split("|")[2].strip() for line in shown[4:]] == ["uncompressed", "1", "1/4 turns"]
    assert len(results.read(path)) == 6


def test_a_table_has_errors_and_differences() -> None:
    runs = [
        {"task": "t", "contender": name, "seed": seed, "score": score, "loss": 1, "bits": 2, "all_bits": 3}
        for name, scores in {"uncompressed": (90, 92), "1": (89, 90)}.items()
        for seed, score in enumerate(scores)
    ]
    assert (
        results.table(runs).splitlines()[-1] == "| t | 1 | 2 | 89.50 ± 0.50 | -1.50 ± 0.50 | 1.0000 | 2.000 | 3.000 |"
    )


def test_what_is_no_run_is_named(tmp_path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text(json.dumps({"task": "t"}) + "\n")
    with pytest.raises(RunError, match="line 1"):
        results.read(path)


@pytest.mark.parametrize("flags", ["--tasks weather", "--contenders 1;3/4"])
def test_an_unknown_name_is_one_line(flags: str) -> None:
    flag, names = flags.split()
    with pytest.raises(RunError, match=f"{flag}: .* is not one of those"):
        screen.chosen(flag, names, {"--tasks": TASKS, "--contenders": CONTENDERS}[flag])
