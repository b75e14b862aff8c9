"""A backward pass of a sharded model, unit by unit, on simulated ranks: any order of ranks and messages.

Real is all of `fsdp.Quantizer` but for what it asks FSDP2 and torch's autograd engine, which are made up here.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import RecordingWorld, mean_of, noise, places

from hvd_dyncomp import Controller, LockstepError, Schedule, fsdp
from hvd_dyncomp.exchange.wire import GREETING_BYTES
from hvd_dyncomp.fsdp import quantizer as module
from hvd_dyncomp.fsdp.layout import Place, Unit
from hvd_dyncomp.fsdp.source import ShardGradients
from hvd_dyncomp.meter import allreduce_bytes
from hvd_dyncomp.sessions.session import Session
from hvd_dyncomp.simulate import World

# Sizes that are no multiples of a block; in one bucket with another unit's if buckets did not end with a unit. The
# second has several buckets, the last is skipped.
MODEL = {
    "head": {"head.a": 70, "head.b": 5},
    "body": {"body.a": 200, "body.b": 130, "body.c": 3},
    "stem": {"stem.a": 40, "stem.b": 64},
    "norm": {"norm.skipped": 20},
}
SIZES = {name: size for sizes in MODEL.values() for name, size in sizes.items()}
SHAPE = {"block_size": 64, "min_numel": 10, "bucket_bytes": 900, "skip": lambda name, parameter: "skipped" in name}
CHOICES = st.lists(st.integers(0, 11), min_size=1, max_size=40)
EVERYWHERE = places("2", "3", "2x2")
BACKGROUND = ("_work_in_background",)

ends = threading.local()  # what is called where a thread's backward ends


@pytest.fixture(autouse=True)
def made_up_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def call_at_end(function: Callable[[], None]) -> bool:
        ends.calls.append(function)
        return True

    monkeypatch.setattr(module, "call_at_end", call_at_end)


class MadeUp(Unit):
    """A unit with a layout. `keeps`: whether FSDP makes a gradient of what is averaged, or a copy of it, at once."""

    def __init__(self, name: str, keeps: bool) -> None:
        super().__init__(name, {each: torch.nn.Parameter(torch.zeros(size)) for each, size in MODEL[name].items()})
        self.keeps, start = keeps, 0
        for each, parameter in self.own.items():
            self.places[each] = Place(start, tuple(parameter.shape))
            start += parameter.numel()
        self.numel, self.shapes = start, {each: place.shape for each, place in self.places.items()}

    def trained(self) -> dict[str, torch.Tensor]:
        return {name: parameter for name, parameter in self.own.items() if parameter.requires_grad}

    def stays(self, flat: torch.Tensor, parameters) -> bool:
        return self.keeps and super().stays(flat, parameters)

    def receive(self, flat: torch.Tensor) -> None:
        """What FSDP does when the all-reduce has returned."""
        flat, trained = flat if self.keeps else flat.clone(), self.trained()
        parts = flat.split([parameter.numel() for parameter in trained.values()])
        for parameter, part in zip(trained.values(), parts, strict=True):
            if parameter.grad is None:
                parameter.grad = part
            else:
                parameter.grad += part


class Rank(fsdp.Quantizer):
    """One rank that trains the model; those of `copied` are units whose gradients FSDP copies."""

    def __init__(self, transport, bits=16, copied: Iterable[str] = (), **arguments) -> None:
        self.units = {name: MadeUp(name, name not in copied) for name in MODEL}
        Session.__init__(self, bits, transport, **{**SHAPE, **arguments})
        self._own, self._calls, self._error = {name: each.own for name, each in self.units.items()}, Counter(), None
        parameters = {name: each for unit in self._own.values() for name, each in unit.items()}
        among = transport.for_exchanges({})
        self._source = ShardGradients(among, "fsdp1", (0, 1), parameters, torch.device("cpu"))
        self._source.load(dict(self.units))
        self._unchecked = dict(parameters)
        self._saved = None
        self._plan = self._new_plan(transport.hosts())

    def noise(self, name: str, step: int) -> torch.Tensor:
        return torch.cat([noise(each, SIZES[each], self._source.rank, step) for each in self.units[name].trained()])

    def backward(self, order: Iterable[str], step: int) -> dict[str, torch.Tensor]:
        """A pass through units in an order; a unit's second gradient is that of 100 steps later. Returns means."""
        ends.calls, seen = [], set()
        for parameter in self._source.by_name.values():
            parameter.grad = None
        for name in order:
            flat = self.noise(name, step + 100 * (name in seen))
            seen.add(name)
            self.hand_over(self.units[name], flat)
            self.units[name].receive(flat)
        while ends.calls:
            ends.calls.pop(0)()
        return self.means()

    def means(self) -> dict[str, torch.Tensor]:
        return {name: each.grad.clone() for name, each in self._source.trained() if each.grad is not None}

    def hand_over(self, unit: Unit, flat: torch.Tensor) -> None:
        self.on_unit(unit.name, flat, sums=False)


class Whole(Rank):
    """All of a backward pass in one step, as DistributedDataParallel's are."""

    _waiting = Session._waiting

    def hand_over(self, unit: Unit, flat: torch.Tensor) -> None:
        step = self._step or self._begin()
        if not ends.calls:
            ends.calls.append(lambda: self._end(step))
        slots = self._plan.slots if step.bits != 32 else {}
        gradients = unit.gradients(flat, fits=True)
        step.reduce(unit.name, {name: gradients[name] for name in gradients if name not in slots})
        for name in reversed(list(gradients)):
            if name in slots:
                step.add(slots[name], gradients[name])

    def _new_step(self, plan, turn, **arguments):
        return Session._new_step(self, plan, turn, **arguments)


def equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def same_on_all(seen: Sequence[dict[str, torch.Tensor]]) -> bool:
    return all(equal(seen[0], other) for other in seen)


def owed(rank: Rank) -> dict[str, torch.Tensor]:
    """All of a rank's residuals."""
    state = rank.state_dict()
    return {
        **{name: values.clone() for name, values in state["residuals"].items()},
        **{f"{name}, summed": shard["values"].clone() for name, shard in state["shard_residuals"].items()},
    }


ORDERS = st.lists(st.permutations(sorted(MODEL)), min_size=4, max_size=4)


@pytest.mark.promise("FSDP2: exchanging modules one by one gives the same means as exchanging them together.")
@EVERYWHERE
@settings(max_examples=40, deadline=None)
@given(choices=CHOICES, orders=ORDERS, copied=st.sets(st.sampled_from(sorted(MODEL))))
def test_units_that_travel_by_themselves_have_the_means_of_one_step(ranks, hosts, choices, orders, copied):
    """To the bit, at levels that fall and rise; with the same residuals. Whatever order the units come in."""

    def program(kind, transport):
        controller = Controller(Schedule({0: 0.25, 1: 4, 2: 32, 3: 16}), transport=transport)
        rank, seen = kind(transport, controller, copied if kind is Rank else ()), []
        for step, order in enumerate(orders):
            seen.append((rank.backward(order, step), owed(rank)))
            controller.step({})
        return seen, rank.meter.total()

    seen = World(ranks, choices, hosts).run(lambda transport: program(Rank, transport))
    expected = World(ranks, (), hosts).run(lambda transport: program(Whole, transport))
    assert same_on_all([each[-1][0] for each, _ in seen])
    handshakes = len(orders) * (len(MODEL) - 1) * allreduce_bytes(GREETING_BYTES * ranks, ranks)
    for (each, sent), (wanted, as_one) in zip(seen, expected, strict=True):
        for step, (ours, theirs) in enumerate(zip(each, wanted, strict=True)):
            assert equal(ours[0], theirs[0]) and equal(ours[1], theirs[1]), step
        assert sent.sent_bytes == pytest.approx(as_one.sent_bytes + handshakes)
        assert sent.float32_bytes == pytest.approx(as_one.float32_bytes)
        assert sent.steps == len(orders)


@EVERYWHERE
@pytest.mark.parametrize("bits", [16, 32])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_units_that_are_used_twice_or_not_at_all_or_are_frozen(ranks, hosts, bits, data):
    choices = data.draw(CHOICES)
    copied = data.draw(st.sets(st.sampled_from(sorted(MODEL))))
    used = data.draw(st.lists(st.lists(st.sampled_from(sorted(MODEL)), max_size=6), min_size=2, max_size=3))
    used = [[name for i, name in enumerate(each) if each[:i].count(name) < 2] for each in used]
    frozen = data.draw(st.lists(st.sets(st.sampled_from(["head.b", "body.b", "stem.a"])), min_size=3, max_size=3))

    def program(transport):
        rank, seen = Rank(transport, bits, copied), []
        for step, order in enumerate(used):
            for name, parameter in rank._source.by_name.items():
                parameter.requires_grad_(name not in frozen[step])
            seen.append(rank.backward(order, step))
        return seen

    seen = World(ranks, choices, hosts).run(program)
    for step, order in enumerate(used):
        assert same_on_all([each[step] for each in seen])
        assert seen[0][step].keys() == {name for unit in order for name in MODEL[unit]} - frozen[step]
        for name, got in seen[0][step].items():
            times = order.count(name.split(".")[0])
            mean = sum(mean_of(name, SIZES[name], step + 100 * i, range(ranks), ranks) for i in range(times))
            # At 16 bits also what was owed before.
            assert (got - mean).norm() <= {16: 2e-3, 32: 1e-5}[bits] * (1 + mean.norm()), (step, name)


@pytest.mark.promise("FSDP2: hooks do not wait where FSDP leaves gradients in place.")
@EVERYWHERE
def test_hooks_wait_for_nobody(ranks, hosts):
    """From the second backward pass on, where FSDP leaves gradients as they are."""
    world = RecordingWorld(ranks, hosts=hosts)

    def program(transport):
        rank = Rank(transport, 4)
        rank.backward(MODEL, 0)
        if transport.rank == 0:
            waits = len(world.waits)
            take = rank.hand_over

            def without_waiting(unit, flat):
                take(unit, flat)
                assert [wait for wait in world.waits[waits:] if wait[0] == 0] == []

            rank.hand_over = without_waiting
        return rank.backward(MODEL, 1)

    assert same_on_all(world.run(program))


def test_after_a_rise_to_32_bits_a_units_step_delivers_what_it_is_owed():
    """The others' residuals stay as they are, to the bit, and arrive when their units are used again."""

    def program(transport):
        controller = Controller(Schedule({0: 0.25, 1: 32}), transport=transport)
        rank = Rank(transport, controller)
        rank.backward(MODEL, 0)
        before = owed(rank)
        controller.step({})
        of_body = {"body.a", "body.b", "body.c"}
        rank.backward(["body"], 1)
        after = owed(rank)
        for name, values in before.items():
            if name.split(",")[0] in of_body:
                assert name not in after or not after[name].any(), name
            else:
                assert torch.equal(after[name], values), name
        assert before["stem.a"].any()
        return {name: before[name] for name in ("stem.a", "stem.b")}, rank.backward(["stem"], 2)

    seen = World(3).run(program)
    for name in ("stem.a", "stem.b"):
        mean = mean_of(name, SIZES[name], 2, range(3), 3)
        assert (seen[0][1][name] - mean).norm() > 0.05 * mean.norm()  # it has brought more


@pytest.mark.parametrize("copied", [(), MODEL], ids=["at backward's end", "in hooks"])
def test_who_waits_for_a_slow_replica_is_blocked_and_the_slow_one_is_not(copied):
    def program(transport):
        rank = Rank(transport, 4, copied)
        rank.backward(MODEL, 0)
        before = rank.meter.total().waited_seconds
        if transport.rank == 0:
            time.sleep(0.6)
        rank.backward(MODEL, 1)
        return rank.meter.total().waited_seconds - before

    slow, *others = World(3).run(program)
    assert slow < 0.3 < max(others) < 5  # ranks take turns: one may begin when the slow one has slept


WRONG = {
    "another order": (lambda rank: None, ["head", "stem", "body"], r"rank 0 has module (body|stem), rank . has"),
    "a frozen parameter": (
        lambda rank: rank.units["body"].own["body.b"].requires_grad_(False),
        ["head", "body", "stem"],
        r"rank 0 has frozen parameters \[('body.b')?\], rank . has",
    ),
}


@EVERYWHERE
@pytest.mark.parametrize("bits", [4, 32])
@pytest.mark.parametrize("wrong", WRONG)
@settings(max_examples=15, deadline=None)
@given(choices=CHOICES, odd=st.integers(0, 1))
def test_ranks_that_disagree_on_the_second_of_three_units(ranks, hosts, bits, wrong, choices, odd):
    """All raise the same error, and nothing of the third is under way anywhere, then or later."""
    spoil, other, text = WRONG[wrong]
    world = RecordingWorld(ranks, choices, hosts)

    def program(transport):
        rank, order = Rank(transport, bits), ["head", "body", "stem"]
        rank.backward(order, 0)
        if transport.rank == odd:
            spoil(rank)
            order = other
        with pytest.raises(LockstepError, match=text) as error:
            rank.backward(order, 1)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="interrupted by LockstepError: .*restart all ranks"):
                rank.backward(order, 2)
        return str(error.value)

    assert len(set(world.run(program))) == 1
    assert len(world.messages(".handshake")) == (3 + 2) * ranks
    assert len(world.messages(".introduction")) in (0, ranks)


@EVERYWHERE
@settings(max_examples=15, deadline=None)
@given(choices=CHOICES, odd=st.integers(0, 1))
def test_replicas_that_begin_unequal(ranks, hosts, choices, odd):
    """All parameters are compared in the first step, also after a state was loaded; and then no more."""

    def program(transport):
        rank, other = Rank(transport), Rank(transport)
        other._source.label = "fsdp2"
        rank.backward(["head", "body"], 0)
        for each in (rank, other):
            with torch.no_grad():
                each.units["stem"].own["stem.b"][7] = transport.rank == odd
        rank.backward(["head", "stem"], 1)
        rank.load_state_dict(rank.state_dict())
        for each in (rank, other):
            with pytest.raises(LockstepError, match="has values of stem.b, as a checksum, .*load the same checkpoint"):
                each.backward(["head"], 2)

    World(ranks, choices, hosts).run(program)


class FailingGradients(dict):
    """Those of a unit; asked for one, within a step, they raise an error."""

    def __init__(self, gradients, error: BaseException) -> None:
        super().__init__(gradients)
        self._error = error

    def __getitem__(self, name: str):
        raise self._error


@contextlib.contextmanager
def failing(rank: Rank, unit: str, error: BaseException, within: bool) -> Iterator[None]:
    """In that unit's hook: before its step begins, or within the step."""

    def fails(*arguments):
        raise error

    its = rank.units[unit]
    gradients, stays = its.gradients, its.stays
    if within:
        its.gradients = lambda flat, **how: FailingGradients(gradients(flat, **how), error)
    else:
        its.stays = fails
    try:
        yield
    finally:
        its.gradients, its.stays = gradients, stays


@EVERYWHERE
@pytest.mark.parametrize("bits", [4, 32])
@pytest.mark.parametrize("kind", [MemoryError, KeyboardInterrupt])
@settings(max_examples=15, deadline=None)
@given(choices=CHOICES, odd=st.integers(0, 1), unit=st.sampled_from(["head", "body", "stem"]), within=st.booleans())
def test_an_error_in_one_ranks_hook(ranks, hosts, bits, kind, choices, odd, unit, within):
    """It is final there, and the others have an error when its program has ended."""

    def program(transport):
        rank, order = Rank(transport, bits), ["head", "body", "stem"]
        rank.backward(order, 0)
        mine = transport.rank == odd
        with (
            failing(rank, unit, kind("no more"), within) if mine else contextlib.nullcontext(),
            pytest.raises(kind if mine else LockstepError, match="no more") as error,
        ):
            for step in (1, 2, 3):  # all that the others need of one may have been sent
                rank.backward(order, step)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="was interrupted by"):
                rank.backward(order, 2)
        raise error.value

    with pytest.raises((kind, LockstepError), match="no more"):
        World(ranks, choices, hosts).run(program)


@EVERYWHERE
@settings(max_examples=15, deadline=None)
@given(choices=CHOICES, within=st.booleans())
def test_an_error_in_every_ranks_hook(ranks, hosts, choices, within):
    """In whichever."""
    units = ["head", "body", "stem"]

    def program(transport):
        rank = Rank(transport)
        rank.backward(units, 0)
        error = MemoryError(f"on {transport.rank}")
        with (
            failing(rank, units[transport.rank % 3], error, within),
            pytest.raises((MemoryError, LockstepError), match=r"on \d") as raised,  # or another rank's error
        ):
            rank.backward(units, 1)
        with pytest.raises(RuntimeError, match="was interrupted by"):
            rank.backward(units, 2)
        raise raised.value

    with pytest.raises((MemoryError, LockstepError), match=r"on \d"):
        World(ranks, choices, hosts).run(program)
