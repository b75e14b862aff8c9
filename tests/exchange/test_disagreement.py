"""Ranks that differ: each says the same, in words, and nothing is sent that only fits if they do not differ."""

from collections.abc import Callable

import horovod.torch as hvd
import pytest
import torch
from simulated import (
    WORLDS,
    RecordingWorld,
    SimulatedOptimizer,
    Worker,
    mean_of,
    noise,
    on_ranks,
    parameters,
)

from hvd_dyncomp import DynamicQuantizer, LockstepError
from hvd_dyncomp.simulate import InProcessTransport
from hvd_dyncomp.transport.horovod import HorovodTransport

SIZES = {"a": 130, "b": 500, "small": 5}


def said(
    ranks: int, hosts: tuple, odd: dict, sizes: dict[str, int] = SIZES, bits: int = 4, attach: bool = False
) -> tuple[list[str], RecordingWorld]:
    """What the ranks say in a step when rank 1 has other arguments, another model or another level."""

    def program(transport) -> str:
        mine = odd if transport.rank == 1 else {}
        own = sizes if transport.rank == 1 else SIZES
        level = bits if transport.rank == 1 else 4
        with pytest.raises((LockstepError, ValueError)) as caught:
            worker = Worker(transport, own, level, **{"bucket_bytes": 1, "attach": attach, **mine})
            worker.step({name: noise(name, p.numel(), transport.rank, 0) for name, p in worker.parameters.items()})
        return f"{type(caught.value).__name__}: {caught.value}"

    world = RecordingWorld(ranks, hosts=hosts)
    return world.run(program), world


CASES = {
    "another level": ({}, SIZES, 8, "rank 0 has bits 4, rank 1 has 8"),
    "uncompressed": ({}, SIZES, 32, "rank 0 has bits 4, rank 1 has 32"),
    "another block size": ({"block_size": 128}, SIZES, 4, "rank 0 has block_size 64, rank 1 has 128"),
    "error feedback": ({"error_feedback": False}, SIZES, 4, "rank 0 has error_feedback True, rank 1 has False"),
    "skip": (
        {"skip": lambda name, p: name == "b"},
        SIZES,
        4,
        "parameter b is float32 (500,) on rank 0, float32 (500,) (not compressed) on rank 1",
    ),
    "a shape": ({}, {**SIZES, "a": 131}, 4, "parameter a is float32 (130,) on rank 0, float32 (131,) on rank 1"),
    "a parameter": ({}, {"a": 130, "small": 5}, 4, "parameter b is float32 (500,) on rank 0, not there on rank 1"),
    "an order": ({}, dict(reversed(SIZES.items())), 4, "rank 0 and rank 1 have the same parameters in another order"),
}


@WORLDS
@pytest.mark.parametrize("attach", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_every_rank_says_who_differs_in_what(case, attach, ranks, hosts):
    """In the first step; a level in the first that is compressed; another model in `attach`."""
    odd, sizes, bits, words = CASES[case]
    if bits != 4 and not attach:
        return
    texts, world = said(ranks, hosts, odd, sizes, bits, attach)
    if attach and sizes != SIZES or list(sizes) != list(SIZES):
        words = "the ranks attach to different optimizers: " if attach else words
    assert len(set(texts)) == 1 and words in texts[0] and texts[0].startswith("LockstepError"), texts
    asked = ("introduction", "attach", "models", "hosts")
    assert {sent.kind for sent in world.sent if not sent.name.endswith(asked)} <= {"sum"}, "something was exchanged"


def test_a_rank_in_another_step():
    def program(worker: Worker) -> str:
        worker.step(worker.noise(0))
        worker.quantizer._steps += worker.transport.rank
        with pytest.raises(LockstepError) as caught:
            worker.step(worker.noise(1))
        return str(caught.value)

    texts, _ = on_ranks(2, program, SIZES, 4)
    assert len(set(texts)) == 1 and "rank 0 has step 1, rank 1 has 2 (was the quantizer's state loaded" in texts[0]


@WORLDS
def test_a_rank_that_cannot_begin_tells_the_others_why(ranks, hosts):
    other = torch.nn.Parameter(torch.zeros(5))
    texts, _ = said(ranks, hosts, {"named_parameters": [("other", other)]})
    assert texts[1].startswith("ValueError: named_parameters must name every parameter")
    for text in texts[:1] + texts[2:]:
        assert text.startswith("LockstepError: rank 1 cannot use its quantizer: named_parameters must name")
    texts, _ = said(ranks, hosts, {"named_parameters": [("other", other)]}, attach=True)
    assert texts[1].startswith("ValueError: named_parameters must name every parameter")
    for text in texts[:1] + texts[2:]:
        assert text.startswith("LockstepError: rank 1 cannot attach its quantizer: ValueError: named_parameters must")


def test_a_device_that_the_transport_cannot_send_from_is_refused_on_every_rank(monkeypatch):
    monkeypatch.setattr(InProcessTransport, "unsupported_reason", lambda transport, device: f"no road from {device}")
    texts, _ = said(3, (), {})
    assert texts == ["ValueError: parameters on cpu cannot be sent: no road from cpu"] * 3


def test_horovod_sends_from_gpus_only_if_it_was_built_for_them(monkeypatch):
    for built in (True, False):
        monkeypatch.setattr(hvd, "cuda_built", lambda built=built: built)
        said = HorovodTransport().unsupported_reason(torch.device("cuda:1"))
        assert built == (not said) and (built or "build it with HOROVOD_GPU_OPERATIONS=NCCL" in said)
        assert HorovodTransport().unsupported_reason(torch.device("cpu")) == ""


@pytest.mark.parametrize("torchs", [None, "6.4.43482"])
@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize("rocm", [False, True])
def test_a_horovod_for_the_gpus_of_another_maker_is_refused(monkeypatch, torchs, cuda, rocm):
    """torch calls AMD's "cuda" as well."""
    monkeypatch.setattr(torch.version, "hip", torchs)
    monkeypatch.setattr(hvd, "cuda_built", lambda: cuda)
    monkeypatch.setattr(hvd, "rocm_built", lambda: rocm)
    said = HorovodTransport().unsupported_reason(torch.device("cuda:0"))
    if torchs is None:
        assert cuda == (not said) and (cuda or "without CUDA" in said and "HOROVOD_GPU=CUDA" in said)
    else:
        assert rocm == (not said) and (rocm or "without ROCm" in said and "HOROVOD_GPU=ROCM" in said)
    assert HorovodTransport().unsupported_reason(torch.device("cpu")) == ""


@pytest.mark.parametrize(("value", "refused"), [("1", True), (" 01", True), ("0", False), ("", False), ("yes", False)])
@pytest.mark.parametrize("variable", ["HOROVOD_ENABLE_ASYNC_COMPLETION", "HOROVOD_ENABLE_XLA_OPS"])
def test_a_horovod_that_says_too_early_that_a_gpu_is_done_is_refused(monkeypatch, variable, value, refused):
    monkeypatch.setattr(hvd, "cuda_built", lambda: True)
    monkeypatch.setenv(variable, value)
    assert refused == ("unset it" in HorovodTransport().unsupported_reason(torch.device("cuda:0")))
    assert HorovodTransport().unsupported_reason(torch.device("cpu")) == ""


@pytest.mark.parametrize("op", ["Adasum", "Min"])
def test_a_reduction_that_is_not_linear_is_refused_before_anything_is_sent(op):
    def program(worker: Worker) -> str:
        with pytest.raises(ValueError) as caught:
            worker.backward(worker.noise(0))
        return str(caught.value)

    texts, world = on_ranks(2, program, SIZES, 4, op=getattr(hvd, op), attach=False)
    assert all("works with op=hvd.Average and op=hvd.Sum, got op=" in text for text in texts) and not world.sent


def test_a_second_optimizer_is_refused_while_the_first_one_lives():
    def program(worker: Worker) -> str:
        worker.step(worker.noise(0))
        second = SimulatedOptimizer(parameters(SIZES), worker.quantizer, worker.transport)
        with pytest.raises(ValueError) as caught:
            second.backward(next(iter(second.param_groups[0]["params"])), torch.ones(130))
        return str(caught.value)

    texts, _ = on_ranks(2, program, SIZES, 4)
    assert all(text.startswith("a DynamicQuantizer serves one optimizer") for text in texts)


def test_attach_wants_an_optimizer_that_compresses_with_this_quantizer():
    def program(worker: Worker) -> Callable:
        other = SimulatedOptimizer(parameters(SIZES), DynamicQuantizer(), worker.transport)
        with pytest.raises(ValueError, match="for this quantizer, got"):
            worker.quantizer.attach(other)
        worker.quantizer.attach(worker.optimizer)
        worker.quantizer.attach(worker.optimizer)
        return worker.step(worker.noise(0))

    twice, _ = on_ranks(2, program, SIZES, 4)
    once, _ = on_ranks(2, lambda worker: worker.step(worker.noise(0)), SIZES, 4)
    assert all(torch.equal(twice[0][name], once[0][name]) for name in SIZES)


def test_quantizers_of_twin_models_may_use_the_same_names():
    """Theirs are for states and error messages; the optimizers' tell collectives apart."""

    def program(transport) -> list[dict[str, torch.Tensor]]:
        twins = []
        for prefix in ("left", "right"):
            own = parameters(SIZES)
            quantizer = DynamicQuantizer(16, named_parameters=list(own.items()), transport=transport, min_numel=10)
            twins.append(SimulatedOptimizer({f"{prefix}.{n}": p for n, p in own.items()}, quantizer, transport))
        for again in (False, True):  # the second time of gradients that nobody's backward has made
            for number, optimizer in enumerate(twins):
                for parameter in optimizer.param_groups[0]["params"]:
                    gradient = noise(str(parameter.numel()), parameter.numel(), transport.rank, number)
                    if not again:
                        optimizer.backward(parameter, gradient)
            for optimizer in twins[:: -1 if transport.rank and not again else 1]:
                optimizer.synchronize()
        return [[p.grad.clone() for p in optimizer.param_groups[0]["params"]] for optimizer in twins]

    got = RecordingWorld(2).run(program)
    for number in range(2):
        for mine, theirs in zip(got[0][number], got[1][number], strict=True):
            expected = mean_of(str(mine.numel()), mine.numel(), number, range(2), 2)
            assert torch.equal(mine, theirs) and (mine - expected).norm() <= 2e-3 * expected.norm()


@WORLDS
def test_messages_that_are_too_long_are_refused_on_all_ranks(ranks, hosts, monkeypatch):
    """Before anything is sent, whatever ranks share a host. With fewer bits they are not."""
    monkeypatch.setattr("hvd_dyncomp.exchange.plan.MOST_BYTES", 1000)

    def program(worker: Worker) -> str:
        with pytest.raises(ValueError, match="bucket b .* at 16 bits") as caught:
            worker.step(worker.noise(0))
        return str(caught.value)

    sizes = {"a": 130, "b": 500}
    texts, world = on_ranks(ranks, program, sizes, 16, hosts=hosts, bucket_bytes=1)
    assert len(set(texts)) == 1
    assert all(sent.kind == "sum" or sent.name.endswith(("attach", "introduction")) for sent in world.sent)
    on_ranks(ranks, lambda worker: worker.step(worker.noise(0)), sizes, 4, hosts=hosts, bucket_bytes=1)


@pytest.mark.parametrize("first", [True, False])
def test_a_rank_that_cannot_begin_beside_a_parameter_without_a_gradient(first):
    """Its own `synchronize` would wait for what the others hand over only when they have heard of it."""

    def program(transport) -> str:
        names = [("other", torch.nn.Parameter(torch.zeros(5)))] if transport.rank == 1 else None
        worker = Worker(transport, SIZES, 4, named_parameters=names, attach=False)
        used = ["a"] if first or transport.rank != 1 else []
        with pytest.raises((LockstepError, ValueError)) as caught:
            worker.step({name: noise(name, SIZES[name], transport.rank, 0) for name in used})
        return f"{type(caught.value).__name__}: {caught.value}"

    texts = RecordingWorld(3).run(program)
    assert texts[1].startswith("ValueError: named_parameters must name every parameter"), texts
    assert texts[0] == texts[2] and "rank 1 cannot use its quantizer: named_parameters must" in texts[0], texts
