"""What goes wrong on one rank in the middle of an exchange: all ranks hear of it, and nobody waits for ever."""

import re
from collections.abc import Callable, Iterable

import pytest
import torch
from simulated import PLACES, RecordingWorld, Worker, mean_of, on_ranks, phases, places

from hvd_dyncomp import LockstepError
from hvd_dyncomp.exchange.buckets import Bucket
from hvd_dyncomp.exchange.messages import Messages
from hvd_dyncomp.exchange.reduction import PairReduction, ShardedReduction
from hvd_dyncomp.exchange.residuals import Residuals
from hvd_dyncomp.exchange.routes import Hierarchical
from hvd_dyncomp.exchange.task import Task
from hvd_dyncomp.exchange.wire import HEADER_BYTES

SIZES = {"a": 650, "b": 200}
HERE = ["2", "3", "2x2", "2x2 dealt", "3x2"]
# What a rank does in a step, one after the other.
POINTS = {
    "prepare": [(Hierarchical, "_scatter")],
    "sum": [(Hierarchical, "_add")],
    "encode": [(PairReduction, "encode"), (ShardedReduction, "encode")],
    "reduce": [(ShardedReduction, "_reduced")],
    "decode": [(PairReduction, "decode"), (ShardedReduction, "decode")],
}


def broken(monkeypatch, point: str, victim: int, only: list[bool], error: type[BaseException] = MemoryError) -> None:
    """From when `only` has something, a rank has no room for what it does at this point, or another error."""

    def without_room(real):
        def method(self, *arguments):
            if only and self._bucket.rank == victim:
                raise error("no room")
            return real(self, *arguments)

        return method

    for owner, name in POINTS[point]:
        monkeypatch.setattr(owner, name, without_room(getattr(owner, name)))


def outcomes(
    ranks: int, hosts, steps: int, before_last, world: RecordingWorld | None = None, bits: int = 16, **arguments
) -> list:
    """Per rank, what the last step came to: its error, or its gradients."""

    def program(transport):
        worker = Worker(transport, SIZES, bits, **arguments)
        for step in range(steps):
            if step == steps - 1:
                worker.barrier("before the last")
                before_last()
            try:
                got = worker.step(worker.noise(step))
            except (MemoryError, KeyboardInterrupt, ZeroDivisionError, LockstepError) as error:
                return error
        return got

    return (world or RecordingWorld(ranks, hosts=hosts)).run(program)


def named(error: Exception) -> int:
    """The rank that an error names."""
    assert isinstance(error, LockstepError), error
    found = re.match(r"bucket b: rank (\d+) ", str(error))
    assert found, error
    return int(found[1])


def blamed(errors: list, rank: int) -> int:
    """Each names the rank that it had nothing from, whose own error says why: the first that says something else."""
    seen = []
    while "gave up the exchange" in str(errors[rank]):
        assert rank not in seen, errors
        seen.append(rank)
        rank = named(errors[rank])
    return rank


def cases(wanted: Callable[[str, list[str]], bool], words: Iterable[str]) -> pytest.MarkDecorator:
    """By place and word, where a word is wanted with the phases that there are."""
    found = [(name, word) for name in HERE for word in words if wanted(word, phases(*PLACES[name]))]
    values = [(*PLACES[name], word) for name, word in found]
    return pytest.mark.parametrize(("ranks", "hosts", "word"), values, ids=map(" ".join, found))


def is_reached(point: str, names: list[str]) -> bool:
    """Whether a rank can give up there, when these are the phases."""
    needs = {"prepare": "local_scatter", "sum": "local_scatter", "reduce": "gather"}
    return point != "decode" and needs.get(point, names[0]) in names


@cases(is_reached, POINTS)
@pytest.mark.parametrize("steps", [1, 2])
def test_an_error_on_any_rank_reaches_all(ranks, hosts, word, steps, monkeypatch):
    """In the first step, where nobody knows yet where the ranks are, and later, where messages are made in backward."""
    kind = (MemoryError, KeyboardInterrupt)[steps - 1]
    for victim in range(ranks):
        with monkeypatch.context() as patch:
            now: list[bool] = []
            broken(patch, word, victim, now, kind)
            errors = outcomes(ranks, hosts, steps, lambda now=now: now.append(True))
        assert isinstance(errors[victim], kind), errors
        for rank in set(range(ranks)) - {victim}:
            assert isinstance(errors[rank], LockstepError) and blamed(errors, rank) == victim, errors


@places(*HERE)
def test_an_error_after_all_is_sent_is_that_rank_s_alone(ranks, hosts, monkeypatch):
    for victim in (0, ranks - 1):
        with monkeypatch.context() as patch:
            now: list[bool] = []
            broken(patch, "decode", victim, now)
            got = outcomes(ranks, hosts, 2, lambda now=now: now.append(True))
        assert isinstance(got[victim], MemoryError), got
        for rank in set(range(ranks)) - {victim}:
            for name, size in SIZES.items():
                expected = mean_of(name, size, 1, range(ranks), ranks)
                assert (got[rank][name] - expected).norm() <= 2e-3 * expected.norm()


class Damaging(RecordingWorld):
    """From when `now` has something, what one rank sends in one phase has a wrong step in its headers' first."""

    def __init__(self, ranks, hosts, phase: str, culprit: int) -> None:
        super().__init__(ranks, hosts=hosts)
        self.phase, self.culprit, self.now = phase, culprit, []

    def start(self, rank, kind, tensor, splits, name, arriving):
        if self.now and rank == self.culprit and name.endswith(f".{self.phase}"):
            tensor = tensor.clone()
            start = 0
            for length in splits or [tensor.numel()]:
                if length:
                    tensor[start] ^= 7  # in the step's number
                    assert length >= HEADER_BYTES
                start += length
        return super().start(rank, kind, tensor, splits, name, arriving)


@cases(lambda phase, names: phase in names, ["local_scatter", "pair", "scatter", "gather", "local_gather"])
def test_a_damaged_message_is_refused_by_all_who_get_it(ranks, hosts, word):
    for culprit in range(ranks):
        world = Damaging(ranks, hosts, word, culprit)
        errors = outcomes(ranks, hosts, 2, lambda world=world: world.now.append(True), world)
        first = [e for e in errors if isinstance(e, LockstepError) and "has step" in str(e)]
        assert first, errors
        assert all(named(error) == culprit for error in first), errors
        for rank, error in enumerate(errors):
            if isinstance(error, dict):  # the culprit's own copy is whole, where it keeps one, or hands one on
                assert world.hosts[rank] == world.hosts[culprit] or word == "local_gather", errors
            elif error not in first:
                assert errors[blamed(errors, rank)] in first, errors


@pytest.mark.parametrize(("word", "hosts", "refused"), [("local_gather", (0, 0, 1, 1), {0, 1}), ("pair", (0, 1), {0})])
def test_a_message_of_another_length_is_refused(word, hosts, refused):
    """What is too short, or too long, in what neighbours hand on, or one of two workers sends."""
    for change in (-4, 4):

        class Cut(Damaging):
            def start(self, rank, kind, tensor, splits, name, arriving, change=change):
                if self.now and rank == self.culprit and name.endswith(f".{self.phase}"):
                    pieces = [piece for piece in tensor.split(splits) if len(piece)]
                    pieces = [torch.cat([piece, piece[:4]])[: len(piece) + change] for piece in pieces]
                    splits = [length and length + change for length in splits]
                    tensor = torch.cat(pieces)
                return super(Damaging, self).start(rank, kind, tensor, splits, name, None)  # Horovod takes all

        world = Cut(len(hosts), hosts, word, 1)
        errors = outcomes(len(hosts), hosts, 2, lambda world=world: world.now.append(True), world)
        assert {rank for rank, error in enumerate(errors) if isinstance(error, LockstepError)} == refused, errors
        assert all(isinstance(errors[rank], dict) for rank in set(range(len(hosts))) - refused), errors


@pytest.mark.parametrize("victim", [0, 2])
def test_a_bucket_that_cannot_be_divided_on_one_rank(victim, monkeypatch):
    """When it becomes known where the ranks are, there is no room for the residuals."""
    real = Bucket.arrange

    def arrange(bucket: Bucket, *arguments, **keywords) -> None:
        with monkeypatch.context() as patch:
            if bucket.rank == victim and keywords["by_host"]:
                patch.setattr(Residuals, "arranged", lambda *arguments: 1 / 0)
            real(bucket, *arguments, **keywords)

    monkeypatch.setattr(Bucket, "arrange", arrange)
    ranks, hosts = PLACES["2x2"]
    errors = outcomes(ranks, hosts, 1, lambda: None)
    assert isinstance(errors[victim], ZeroDivisionError)
    assert all(blamed(errors, rank) == victim for rank in range(ranks))


@places("2", "3", "2x2")
def test_after_an_error_in_one_bucket_the_others_are_exchanged(ranks, hosts, monkeypatch):
    """Which is not noticed where it happened: the others wait for all of them."""
    real = Messages.__init__

    def without_room(messages: Messages, bucket, *arguments) -> None:
        real(messages, bucket, *arguments)
        if bucket.rank == 1 and bucket.name == "c":
            monkeypatch.setattr(messages, "room", lambda *arguments: 1 / 0)

    monkeypatch.setattr(Messages, "__init__", without_room)

    def program(worker: Worker) -> str:
        with pytest.raises((ZeroDivisionError, LockstepError)) as caught:
            worker.step(worker.noise(0))
        return f"{type(caught.value).__name__}: {caught.value}"

    texts, world = on_ranks(ranks, program, {"a": 100, "b": 100, "c": 100}, 4, hosts=hosts, bucket_bytes=1)
    assert texts[1].startswith("ZeroDivisionError")
    for phase in phases(ranks, hosts):
        assert {len(world.messages(f"a.{phase}", rank)) for rank in range(ranks)} == {1}


def test_what_an_interruption_loses_is_not_taken_for_a_message():
    """The collective is over, and what it has brought is gone."""

    class Interrupted(Task):
        def receive(self, handle):
            super().receive(handle)
            raise KeyboardInterrupt

    def program(transport) -> None:
        received = []

        def work():
            received.append((yield transport.sum(torch.ones(1), "sum")))

        task = Interrupted(transport, work())
        with pytest.raises(KeyboardInterrupt):
            task.wait()
        assert task.done and isinstance(task.error, KeyboardInterrupt) and not received

    RecordingWorld(2).run(program)
