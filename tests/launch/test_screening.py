"""The screening of ways to send few bits: what is sent, what is owed, and what is written down."""

import json
from dataclasses import replace

import pytest
import torch

from common.errors import RunError
from hvd_dyncomp import kernels
from screening import aggregation, codec, comparators, feedback, results, text
from screening import program as screen
from screening.aggregation import Small
from screening.contenders import CONTENDERS, RIVALS, Contender
from screening.tasks import TASKS, Task, prepare, varied
from screening.trainer import leave_momentum_out, optimizer, put_momentum_back, step_frozen, train
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
        [arrived], sent = sender.send([gradient], bits)
        message = torch.empty(3 * kernels.block_bytes(bits, 512), dtype=torch.uint8)
        kernels.encode_into(message, [gradient], residual, bits=bits, block_size=512)
        expected = torch.empty(1300)
        kernels.decode_into([expected], [message], bits=bits, block_size=512)
        assert sent == message.numel() + codec.HEADER_BYTES
        torch.testing.assert_close(arrived, expected)
        torch.testing.assert_close(sender.residuals[0], residual[:1300])


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("owes", [True, False])
def test_what_does_not_arrive_is_owed_and_without_feedback_lost(bits: float, owes: bool) -> None:
    sender = feedback.Sender([700, 600], owes)
    given, got = torch.zeros(700), torch.zeros(700)
    for step in range(9):
        tensors = [torch.randn(size, generator=torch.Generator().manual_seed(step)) for size in (700, 600)]
        given += tensors[0]
        got += sender.send(tensors, bits)[0][0]
    if owes:
        torch.testing.assert_close(got + sender.residuals[0], given, rtol=1e-4, atol=1e-4)
    else:
        assert not sender.residuals
        assert (got - given).norm() > 1e-3 * given.norm()


@pytest.mark.parametrize("name", ["both", "workers", "none"])
def test_feedback_can_be_left_out_on_one_side_and_on_both(name: str) -> None:
    contender = Contender("x", budget=((0.0, 1),), feedback=name)
    exchange = aggregation.Quantized(contender, SHAPES, 3)
    assert [bool(sender.residuals) for sender in exchange.senders] == [name != "none"] * 3
    assert exchange.owner is not None
    assert bool(exchange.owner.residuals) == (name == "both")


@pytest.mark.parametrize(("workers", "values"), [(2, 4), (3, 2)])
def test_the_sum_of_more_than_two_is_quantized_once_more(workers: int, values: int) -> None:
    exchange = comparators.aggregator(CONTENDERS["1"], [torch.Size((512,))], workers, 0)
    exchange.new_step(0.0)
    generator = torch.Generator().manual_seed(0)
    [mean] = exchange.mean([[torch.randn(512, generator=generator)] for _ in range(workers)])
    assert len(mean.unique()) == values


@pytest.mark.parametrize("name", ["uncompressed", "fp16", "2", "PowerSGD rank 4", "8, scale per tensor"])
@pytest.mark.parametrize("workers", [2, 3])
def test_what_arrives_in_many_steps_is_the_mean(name: str, workers: int) -> None:
    exchange = comparators.aggregator(CONTENDERS[name], SHAPES, workers, 0)
    own, arrived = gradients(workers), torch.zeros(SHAPES[0].numel())
    for step in range(300):
        exchange.new_step(step / 300)
        arrived += exchange.mean(own)[0]
    mean = torch.stack([one[0] for one in own]).mean(0)
    assert (arrived / 300 - mean).norm() < 0.15 * mean.norm()


def test_fp16_is_as_exact_as_float16() -> None:
    exchange, own = comparators.aggregator(CONTENDERS["fp16"], SHAPES, 2, 0), gradients(2)
    exchange.new_step(0.0)
    error = (exchange.mean(own)[0] - (own[0][0] + own[1][0]) / 2).abs().max()
    assert 1e-5 < error < 2e-3


def test_one_scale_a_tensor_loses_for_good_what_is_small_beside_its_largest_value() -> None:
    exchange = comparators.aggregator(CONTENDERS["8, scale per tensor"], [torch.Size((1024,))], 1, 0)
    exchange.new_step(0.0)
    gradient = torch.full((1024,), 0.3)
    gradient[0] = 127
    for _ in range(5):
        [mean] = exchange.mean([[gradient]])
        assert mean[0] == 127
        assert not mean[1:].any()


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("uncompressed", 32),
        ("fp16", 16),
        ("1/4", 0.25 + 16 / 512),
        ("2", 2 + 32 / 512),
        ("8, scale per tensor", 8 + 2 * 32 / 6144),
        ("top-k 1/4", 0.25),
        ("PowerSGD rank 1", 32 * (64 + 64 + 64 + 32) / (64 * 64 + 64 * 32)),
        ("DGC 1/4", 0.25),
        ("random-k 1/4, no momentum", 0.25),
        ("natural, 9 bits", 9),
        ("LoCo 4", 4 + 32 / 512 + 8 * codec.HEADER_BYTES / 6144),
    ],
)
def test_bits_are_those_of_the_wire(name: str, bits: float) -> None:
    shapes = [torch.Size((64, 64)), torch.Size((64, 32))]  # whole blocks
    exchange = comparators.aggregator(CONTENDERS[name], shapes, 2, 0)
    own = [[torch.randn(shape.numel()) for shape in shapes] for _ in range(2)]
    for step in range(4):
        exchange.new_step(step / 4)
        exchange.mean(own)
    header = 8 * codec.HEADER_BYTES / 6144 if CONTENDERS[name].method == "quantized" else 0
    assert exchange.traffic.bits == pytest.approx(bits + header, abs=2e-3)


def rival(name: str, workers: int = 2) -> aggregation.Aggregator:
    exchange = comparators.aggregator(CONTENDERS[name], SHAPES, workers, 0)
    return exchange


@pytest.mark.parametrize(
    "name", ["PowerSGD rank 2, small at 8", "top-k 1/4, no momentum", "random-k 1/4, no momentum", "DGC 1/4"]
)
@pytest.mark.parametrize("workers", [2, 3])
def test_what_is_sent_and_what_is_owed_is_what_was_put_in(name: str, workers: int) -> None:
    exchange = rival(name, workers)
    given, arrived = torch.zeros(exchange.values), torch.zeros(exchange.values)
    for step in range(9):
        exchange.new_step(step / 9)
        own = gradients(workers, step)
        given += torch.stack([torch.cat(one) for one in own]).mean(0)
        if name == "DGC 1/4":  # a gradient that has not been sent has been put in once for each step since
            exchange.MOMENTUM = 0.0
        arrived += torch.cat(exchange.mean(own))
    owed = [torch.cat(list(one)) if isinstance(one, list) else one for one in exchange.owed]
    torch.testing.assert_close(arrived + torch.stack(owed).mean(0), given, rtol=1e-3, atol=1e-3)
    assert torch.stack(owed).norm() > 0.1 * given.norm()


@pytest.mark.parametrize("name", ["top-k 1/4, no momentum", "random-k 1/4, no momentum", "DGC 1/4"])
def test_as_many_values_arrive_as_are_counted(name: str) -> None:
    exchange = rival(name, 1)
    exchange.new_step(0.0)
    mean = torch.cat(exchange.mean(gradients(1)))
    assert mean.count_nonzero() * exchange.each / 8 == exchange.traffic.bytes > 0


def test_all_workers_send_the_same_places_of_random_k_and_other_ones_in_the_next_step() -> None:
    exchange = rival("random-k 1/4, no momentum", 3)
    places = []
    for step in range(2):
        exchange.new_step(step / 2)
        places.append(torch.cat(exchange.mean(gradients(3))).nonzero().flatten())
    assert len(places[0]) == round(exchange.values / 4 / 16)
    assert not set(places[0].tolist()) >= set(places[1].tolist())


def test_masks_forget_momentum_where_it_has_been_sent() -> None:
    exchange = rival("DGC 1/4", 1)
    exchange.new_step(0.0)
    sent = torch.cat(exchange.mean(gradients(1))) != 0
    assert not exchange.velocity[0][sent].any() and not exchange.owed[0][sent].any()
    waits = int((~sent).nonzero()[0])
    before = float(exchange.velocity[0][waits])
    exchange.mean([[torch.zeros_like(g) for g in gradients(1)[0]]])
    assert float(exchange.velocity[0][waits]) == pytest.approx(0.9 * before)
    assert float(exchange.owed[0][waits]) in (0.0, pytest.approx(1.9 * before))


def test_natural_compression_is_of_powers_of_two_and_right_in_the_mean() -> None:
    exchange = rival("natural, 9 bits", 1)
    exchange.new_step(0.0)
    own, total = gradients(1), torch.zeros(SHAPES[0].numel())
    for _ in range(400):
        mean = exchange.mean(own)[0]
        assert torch.frexp(mean).mantissa.abs().eq(0.5).all()
        total += mean
    assert (total / 400 - own[0][0]).norm() < 0.03 * own[0][0].norm()
    assert exchange.rounded(torch.tensor([0.0, -2.0, 0.25])).tolist() == [0.0, -2.0, 0.25]


def test_loco_owes_what_8_bits_hold_of_a_moving_average_and_forgets_it() -> None:
    exchange = rival("LoCo 4", 1)
    exchange.new_step(0.0)
    own = torch.cat(gradients(1)[0])
    arrived = torch.cat(exchange.mean(gradients(1)))
    torch.testing.assert_close(exchange.owed[0], codec.decoded(exchange.KEPT * (own - arrived), 8))
    exchange.step = exchange.STEPS - 1
    exchange.mean(gradients(1))
    assert not exchange.owed[0].any()


@pytest.mark.parametrize("name", ["PowerSGD rank 1, small at 8, from 10%", "1-bit Adam, from 15%"])
def test_at_first_everything_travels_uncompressed(name: str) -> None:
    exchange, contender = rival(name), CONTENDERS[name]
    start = contender.budget[1][0]
    for step in range(100):
        exchange.new_step(step / 100)
        before = exchange.traffic.bytes
        exchange.mean(gradients(2, step))
        assert (exchange.traffic.bytes - before == 4 * exchange.values) == (step / 100 < start)
        assert contender.small_bits_at(step / 100) == (32 if step / 100 < start else 8)
        assert contender.keeps_momentum_at(step / 100)
    assert exchange.traffic.bits > 32 * start


def test_of_1_bit_adam_momentum_and_what_is_owed_are_all_that_was_put_in() -> None:
    exchange = rival("1-bit Adam, from 15%")
    beta, moment = exchange.BETA, torch.zeros(exchange.values)
    for step in range(30):
        exchange.new_step(step / 30)
        own = gradients(2, step)
        owed = torch.stack([torch.cat(sender.residuals) for sender in exchange.senders]).mean(0)
        moment = beta * torch.cat(exchange.momentum) + (1 - beta) * torch.stack([torch.cat(o) for o in own]).mean(0)
        exchange.mean(own)
        if step / 30 >= 0.15:
            after = torch.stack([torch.cat(sender.residuals) for sender in exchange.senders]).mean(0)
            torch.testing.assert_close(torch.cat(exchange.momentum) + after, moment + owed, rtol=1e-3, atol=1e-3)
        else:
            torch.testing.assert_close(torch.cat(exchange.momentum), moment)


def test_a_frozen_step_is_adamw_with_this_momentum_and_the_variances_as_they_were() -> None:
    weights = [torch.nn.Parameter(torch.linspace(1, 2, n)) for n in (2000, 3)]
    stepper = optimizer(tiny(optimizer="adamw", rate=0.1, weight_decay=0.01), weights)
    for weight in weights:
        weight.grad = torch.full_like(weight, 2.0)
    weights[0].grad[-1] = 0
    stepper.step()
    variance = stepper.state[weights[0]]["exp_avg_sq"].clone()
    before = weights[0].detach().clone()
    for weight in weights:
        weight.grad = torch.full_like(weight, 3.0)
    step_frozen(stepper)
    # The unbiased variance is the square of the only gradient so far.
    expected = before * (1 - 0.1 * 0.01) - 0.1 * 3 / 2
    torch.testing.assert_close(weights[0].detach()[:-1], expected[:-1])
    assert weights[0][-1] == before[-1] * (1 - 0.1 * 0.01), "it never had a gradient"
    assert stepper.state[weights[0]]["exp_avg_sq"].equal(variance)
    assert float(stepper.state[weights[1]]["step"]) == 2


@pytest.mark.parametrize(
    ("name", "bits", "sent"),
    [
        *[("uncompressed", 32, 4 * 300), ("fp16", 16, 2 * 300), ("1/4", 8, 512 + 4 + codec.HEADER_BYTES)],
        *[("ladder 4-8-16", 16, 1024 + 4 + codec.HEADER_BYTES), ("8, no feedback", 8, 512 + 4 + codec.HEADER_BYTES)],
    ],
)
@pytest.mark.parametrize("workers", [2, 3])
def test_small_tensors_arrive_and_are_counted(name: str, bits: int, sent: int, workers: int) -> None:
    small = Small(CONTENDERS[name], [100, 200], workers)
    arrived, expected = torch.zeros(200), torch.zeros(200)
    for step in range(9):
        generator = torch.Generator().manual_seed(step)
        own = [[torch.randn(size, generator=generator) for size in (100, 200)] for _ in range(workers)]
        means = small.mean(own, bits)
        assert [mean.numel() for mean in means] == [100, 200]
        arrived += means[1]
        expected += torch.stack([one[1] for one in own]).mean(0)
    assert (small.traffic.values, small.traffic.bytes) == (9 * 300, 9 * sent)
    error = (arrived - expected).abs().max()
    assert error < {32: 1e-5, 16: 1e-2, 8: 5e-2}[bits] * (3 if "no feedback" in name else 1)
    assert (error > 1e-4) == (name not in ("uncompressed", "ladder 4-8-16"))


def test_small_tensors_have_8_bits_where_others_have_less() -> None:
    names = ("1/4", "4", "8", "uncompressed", "fp16", "PowerSGD rank 1", "top-k 1/4")
    assert [CONTENDERS[name].small_bits_at(0.0) for name in names] == [8, 8, 8, 32, 16, 32, 32]
    up = CONTENDERS["ladder 4-8-16"]
    assert [up.small_bits_at(progress) for progress in (0.0, 0.1, 0.15, 1.0)] == [8, 8, 8, 16]


def test_a_ladder_changes_the_level() -> None:
    exchange = aggregation.Quantized(CONTENDERS["ladder 1-2-4"], SHAPES, 2)
    for progress, bits in ((0.14, 1), (0.15, 2), (0.39, 2), (0.4, 4), (1.0, 4)):
        exchange.new_step(progress)
        assert exchange.bits == bits


def tiny(**more) -> Task:
    return Task("tiny", **{"model": "mlp", "data": "digits", "limit": 256, "half_size": False, "epochs": 2, **more})


@pytest.mark.parametrize(
    "name",
    [
        *("uncompressed", "1/2", "fp16", "8, scale per tensor", "top-k 1/4"),
        *("PowerSGD rank 4, small at 8, no momentum", "PowerSGD rank 4, small at 8, from 10%", "DGC 1/4"),
        *("LoCo 4", "natural, 9 bits"),
    ],
)
def test_a_run_learns_and_can_be_repeated(name: str, tmp_path) -> None:
    task = tiny(epochs=6)
    work = prepare(task, tmp_path)
    runs = [train(task, work, CONTENDERS[name], seed=1) for _ in range(2)]
    assert [run.pop("seconds") >= 0 for run in runs] == [True, True]
    assert runs[0] == runs[1]
    assert len(runs[0]["curve"]) == 6
    assert runs[0]["score"] > 50, runs[0]["score"]
    assert runs[0]["bits"] < runs[0]["all_bits"] <= 32 or name in ("uncompressed", "fp16")


def test_all_bits_are_of_all_values(tmp_path) -> None:
    task = tiny(epochs=1)
    found, other = (
        train(task, prepare(task, tmp_path), replace(CONTENDERS["1/4"], small_bits=bits), 0) for bits in (0, 32)
    )
    small = 256 + 128 + 10  # the biases
    whole = found["values"]
    with_float32 = (found["bits"] * (whole - small) + 32 * small) / whole
    with_8_bits = (found["bits"] * (whole - small) + 8 * (512 + 4 + codec.HEADER_BYTES)) / whole
    assert other["all_bits"] == pytest.approx(with_float32, abs=2e-4)
    assert found["all_bits"] == pytest.approx(with_8_bits, abs=2e-4)


@pytest.mark.parametrize("task", [tiny(model="resnet8"), tiny(model="transformer", data="docstrings", limit=20000)])
def test_other_models_are_trained(task: Task, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("screening.tasks.STEPS", 4)
    found = train(task, prepare(task, tmp_path), CONTENDERS["1"], seed=0)
    assert 0 <= found["score"] <= 100
    assert 1 < found["bits"] < 1.2


def test_momentum_is_left_out_where_the_library_leaves_it_out() -> None:
    def kept(name: str) -> list[bool]:
        return [CONTENDERS[name].keeps_momentum_at(progress) for progress in (0.0, 0.9)]

    assert [kept(name) for name in ("1/4", "2", "4", "uncompressed", "ladder 1-2-4")] == [
        *([False, False], [False, False], [True, True], [True, True], [False, True])
    ]
    assert kept("1/4, momentum kept") == kept("1/4, no feedback") == kept("top-k 1/4") == [True, True]
    assert kept("uncompressed, no momentum") == kept("1/4, momentum 0.7") == [False, False]


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_left_out_an_optimizer_with_momentum_trains_as_one_without(kind: str, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("screening.trainer.SMALL", 0)  # small tensors keep theirs
    task = tiny(weight_decay=0.01, optimizer=kind, rate=0.01)
    without = replace(task, momentum=0.0, rate=0.1 if kind == "sgd" else 0.01)
    names = {"uncompressed, no momentum": task, "uncompressed": without}
    left_out, plain = (train(own, prepare(own, tmp_path), CONTENDERS[name], 0) for name, own in names.items())
    kept = train(task, prepare(task, tmp_path), CONTENDERS["uncompressed"], 0)
    assert left_out["loss"] == pytest.approx(plain["loss"], rel=1e-3)
    assert kept["loss"] != pytest.approx(plain["loss"], rel=1e-3)


def test_momentum_that_comes_back_starts_anew() -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    task = tiny(weight_decay=0.0, rate=1.0)
    stepper = optimizer(task, [weight])
    steps = []
    for left_out in (False, False, True, False, False):
        before = weight.detach().clone()
        weight.grad = torch.ones(3)
        stepper.param_groups[0]["lr"] = 1.0
        if left_out:
            leave_momentum_out(stepper, task)
        stepper.step()
        put_momentum_back(stepper, task)
        steps.append(float((before - weight.detach())[0]))
    assert steps == pytest.approx([1, 1.9, 10, 1, 1.9])


def test_1_bit_adam_trains_as_adamw_does_and_at_first_is_it(tmp_path) -> None:
    task = Task("tiny", "regression", data="", epochs=4, optimizer="adamw", rate=0.003, weight_decay=0.01)
    names = ("uncompressed", "1-bit Adam, from 30%")
    plain, frozen = (train(task, prepare(task, tmp_path), CONTENDERS[name], 0) for name in names)
    assert plain["curve"][0]["train"] == frozen["curve"][0]["train"]
    assert plain["curve"][1]["train"] != frozen["curve"][1]["train"]
    assert frozen["score"] > plain["score"] - 5
    assert frozen["bits"] == pytest.approx(32 * 0.3 + 1.07 * 0.7, abs=1)


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_a_factor_is_a_rate(kind: str, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("screening.trainer.SMALL", 0)  # small tensors keep their momentum and rate
    task = tiny(weight_decay=0.0, optimizer=kind, rate=0.02)
    half = replace(task, rate=0.01)
    names = {"1/4, c = 0.5": task, "1/4": half}
    one, other = (train(own, prepare(own, tmp_path), CONTENDERS[name], 0) for name, own in names.items())
    assert one["loss"] == other["loss"]


def test_every_rival_says_whether_it_keeps_momentum_and_what_small_tensors_have() -> None:
    for name, choices in RIVALS.items():
        for one in choices:
            assert ("no momentum" in one.name or name == "DGC 1/4") != one.keeps_momentum_at(1.0), one.name
            assert one.small_bits_at(1.0) == (32 if one.name == "top-k 1/4" else 8), one.name
    assert {task.momentum for task in TASKS.values()} == {comparators.MaskedTopK.MOMENTUM}


def test_of_a_varied_task_rate_and_warm_up_are_others_and_nothing_else() -> None:
    base, own = TASKS["mlp"], TASKS[varied("mlp", 2, 0.02)]
    assert own == replace(base, name="mlp, x2, warm-up 2%", rate=2 * base.rate, warm_up=0.02)
    assert varied("mlp", 1, 0.3) == "mlp"


def test_a_warm_up_says_when_the_rate_is_at_its_peak(tmp_path, monkeypatch) -> None:
    seen: list[float] = []
    scheduler = torch.optim.lr_scheduler.OneCycleLR

    def noted(*args, **more) -> torch.optim.lr_scheduler.OneCycleLR:
        seen.append(more["pct_start"])
        return scheduler(*args, **more)

    monkeypatch.setattr(torch.optim.lr_scheduler, "OneCycleLR", noted)
    for warm_up in (0.1, 0.3):
        task = tiny(epochs=1, warm_up=warm_up)
        train(task, prepare(task, tmp_path), CONTENDERS["uncompressed"], 0)
    assert seen == [0.1, 0.3]


def test_skewed_workers_share_no_class(tmp_path) -> None:
    work = prepare(tiny(skewed=True), tmp_path)
    seen = [set(), set()]
    steps = 0
    for batches in work.epoch(0, 0):
        steps += 1
        for own, (_, labels) in zip(seen, batches, strict=True):
            own |= set(labels.tolist())
    assert steps == work.steps
    assert not seen[0] & seen[1] and len(seen[0] | seen[1]) == 10


@pytest.mark.parametrize(("left", "expected"), [(0.5, [5, 7.5, 8.75]), (0.9, [1, 1.9, 2.71]), (0.0, [10, 10, 10])])
def test_what_is_left_of_momentum_adds_up_to_the_same(left: float, expected: list[float]) -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    task = tiny(weight_decay=0.0, rate=1.0)
    stepper = optimizer(task, [weight])
    steps = []
    for _ in expected:
        before = weight.detach().clone()
        weight.grad = torch.ones(3)
        stepper.param_groups[0]["lr"] = 1.0
        leave_momentum_out(stepper, task, left)
        stepper.step()
        put_momentum_back(stepper, task)
        steps.append(float((before - weight.detach())[0]))
    assert steps == pytest.approx(expected)


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
    program.main([*flags, "--contenders", "uncompressed;1;top*4"])
    shown = capsys.readouterr().out.splitlines()
    assert [line.split(",")[1].strip() for line in shown[:2]] == ["top-k 1/4"] * 2
    assert [line.split("|")[2].strip() for line in shown[4:]] == ["uncompressed", "1", "top-k 1/4"]
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


def test_without_feedback_small_tensors_have_none_either() -> None:
    def arrived(name: str) -> torch.Tensor:
        small = Small(CONTENDERS[name], [512], 2)
        own = torch.cat([torch.full((256,), 1.0), torch.full((256,), 1e-3)])  # under half a step of the others
        return sum(small.mean([[own], [own]], 8)[0] for _ in range(20))[256:]

    assert not arrived("1/4, no feedback").any()
    assert (arrived("1/4") - 0.02).abs().max() < 8e-3
