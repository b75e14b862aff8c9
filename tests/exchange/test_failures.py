"""What goes wrong on one rank within a step ends its program, and so the others'. Nobody waits for ever or goes on."""

import contextlib
import re

import pytest
import torch
from coded import HEADER_BYTES
from simulated import PLACES, RecordingWorld, mean_of, noise, phases

from hvd_dyncomp import LockstepError
from hvd_dyncomp.averaging import Averager
from hvd_dyncomp.exchange import buckets
from hvd_dyncomp.exchange.buckets import Bucket
from hvd_dyncomp.exchange.reduction import PairReduction, ShardedReduction
from hvd_dyncomp.exchange.routes import Hierarchical
from hvd_dyncomp.simulate import Deadlock, Ended

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


def noises(rank: int, step: int) -> dict[str, torch.Tensor]:
    return {name: noise(name, size, rank, step) for name, size in SIZES.items()}


def outcomes(ranks: int, hosts, steps: int, before=None, world: RecordingWorld | None = None, bits: float = 16) -> list:
    """Per rank and step, the means, or the error that has ended its program.

    Args:
        before: is called with rank and step.
    """
    seen: list[list] = [[] for _ in range(ranks)]

    def program(transport):
        named = [(name, torch.zeros(size)) for name, size in SIZES.items()]
        averager = Averager(named, bits, transport=transport, block_size=64)
        for step in range(steps):
            given = noises(transport.rank, step)
            if before is not None:
                before(transport.rank, step)
            try:
                averager.mean_(list(given.values()))
            except Exception as error:
                assert not isinstance(error, Deadlock), error
                seen[transport.rank].append(error)
                assert_final(averager, error)
                raise
            seen[transport.rank].append(given)

    with contextlib.suppress(MemoryError, ZeroDivisionError, LockstepError):
        (world or RecordingWorld(ranks, hosts=hosts)).run(program)
    return seen


def assert_final(averager: Averager, cause: Exception) -> None:
    with pytest.raises(RuntimeError) as error:
        averager.mean_([torch.zeros(size) for size in SIZES.values()])
    assert re.fullmatch(
        rf"(a step|step \d+) was interrupted by .*{type(cause).__name__}.*\. Gradients and residuals may be only "
        "partly updated: restart all ranks from a checkpoint",
        str(error.value),
    ), error.value


def is_reached(point: str, names: list[str]) -> bool:
    """Whether a rank comes to a point, when these are the phases."""
    needs = {"prepare": "local_scatter", "sum": "local_scatter", "reduce": "gather"}
    return needs.get(point, names[0]) in names


CASES = [(place, point) for place in HERE for point in POINTS if is_reached(point, phases(*PLACES[place]))]


@pytest.mark.promise("An error within a step is final: the rank that has it raises it, and every further step says so.")
@pytest.mark.parametrize(("place", "point"), CASES)
@pytest.mark.parametrize("steps", [1, 2])
def test_an_error_on_any_rank_ends_all(place, point, steps, monkeypatch):
    """In the first step, where nobody knows yet where the ranks are, and later, where messages are made in backward."""
    ranks, hosts = PLACES[place]
    for victim in range(ranks):
        step_of_victim = []

        def without_room(real, victim=victim, step_of_victim=step_of_victim):
            def method(self, *arguments):
                if self._bucket.rank == victim and step_of_victim == [steps - 1]:
                    raise MemoryError("no room")
                return real(self, *arguments)

            return method

        def before(rank, step, victim=victim, step_of_victim=step_of_victim):
            if rank == victim:
                step_of_victim[:] = [step]

        with monkeypatch.context() as patch:
            for owner, name in POINTS[point]:
                patch.setattr(owner, name, without_room(getattr(owner, name)))
            seen = outcomes(ranks, hosts, steps + 2, before)
        for rank, results in enumerate(seen):
            *means, last = results
            assert all(isinstance(one, dict) for one in means)
            if rank == victim:
                assert isinstance(last, MemoryError) and len(means) == steps - 1, last
                continue
            assert isinstance(last, LockstepError) and f"rank {victim} has ended with MemoryError" in str(last), last
            assert len(means) in (steps - 1, steps)
            if len(means) == steps:  # after all is sent, means are right
                assert point == "decode"
                for name, size in SIZES.items():
                    expected = mean_of(name, size, steps - 1, range(ranks), ranks)
                    assert (means[-1][name] - expected).norm() <= 2e-3 * expected.norm()


@pytest.mark.promise("An error before a step is raised on every rank, with its words.")
@pytest.mark.parametrize("everyone", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_an_error_before_a_step_reaches_all_and_is_final(ranks, everyone):
    def program(transport):
        averager = Averager([("a", torch.zeros(2000))], 4, transport=transport)
        wrong = everyone or transport.rank == 0
        own, theirs = (
            "tensors must be a sequence of 1 tensors",
            "rank 0 cannot use its quantizer: tensors must be a seq",
        )
        with pytest.raises(TypeError if wrong else LockstepError, match=own if wrong else theirs) as error:
            averager.mean_([] if wrong else [torch.ones(2000)])
        assert_final(averager, error.value)

    RecordingWorld(ranks).run(program)


class Damaging(RecordingWorld):
    """From when `now` has something, what one rank sends in one phase has a wrong step in its headers' first."""

    def __init__(self, ranks, hosts, phase: str, culprit: int) -> None:
        super().__init__(ranks, hosts=hosts)
        self.phase, self.culprit, self.now = phase, culprit, []

    def begin(self, rank: int, step: int) -> None:
        if rank == self.culprit and step == 1:
            self.now.append(step)

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


DAMAGED = ["local_scatter", "pair", "scatter", "gather", "local_gather"]


@pytest.mark.parametrize(
    ("place", "phase"), [(place, phase) for place in HERE for phase in DAMAGED if phase in phases(*PLACES[place])]
)
def test_a_damaged_message_is_refused_by_all_who_get_it(place, phase):
    ranks, hosts = PLACES[place]
    for culprit in range(ranks):
        world = Damaging(ranks, hosts, phase, culprit)
        seen = outcomes(ranks, hosts, 2, world.begin, world)
        here = [results[1] for results in seen]
        errors = [error for error in here if isinstance(error, LockstepError) and not isinstance(error, Ended)]
        assert errors
        assert all(re.search(rf"bucket b: rank {culprit} has step \d+, this rank has 1$", str(e)) for e in errors), here
        # The culprit's own copy is whole, where it keeps one, or hands one on.
        whole = {rank for rank, result in enumerate(here) if isinstance(result, dict)}
        assert all(phase == "local_gather" or world.hosts[rank] == world.hosts[culprit] for rank in whole), here


@pytest.mark.parametrize(("phase", "hosts", "refused"), [("local_gather", (0, 0, 1, 1), {0, 1}), ("pair", (0, 1), {0})])
@pytest.mark.parametrize("change", [-4, 4])
def test_a_message_of_another_length_is_refused(phase, hosts, refused, change):
    """What is too short, or too long, in what neighbours hand on, or one of two workers sends."""

    class Cut(Damaging):
        def start(self, rank, kind, tensor, splits, name, arriving):
            if self.now and rank == self.culprit and name.endswith(f".{self.phase}"):
                pieces = [piece for piece in tensor.split(splits) if len(piece)]
                pieces = [torch.cat([piece, piece[:4]])[: len(piece) + change] for piece in pieces]
                splits = [length and length + change for length in splits]
                tensor = torch.cat(pieces)
            return super(Damaging, self).start(rank, kind, tensor, splits, name, None)  # Horovod takes all

    world = Cut(len(hosts), hosts, phase, 1)
    seen = outcomes(len(hosts), hosts, 2, world.begin, world)
    errors = {rank: str(results[1]) for rank, results in enumerate(seen) if type(results[1]) is LockstepError}
    assert errors and refused >= set(errors), seen
    assert all("bytes arrived, expected" in text for text in errors.values()), errors


@pytest.mark.parametrize("victim", [0, 2])
def test_a_bucket_that_cannot_be_divided_on_one_rank(victim, monkeypatch):
    """When it becomes known where the ranks are, there is no room for the residuals."""
    real = Bucket.arrange

    def arrange(bucket: Bucket, *arguments, **keywords) -> None:
        with monkeypatch.context() as patch:
            if bucket.rank == victim and keywords["by_host"]:
                patch.setattr(buckets, "Residuals", lambda *arguments, **keywords: 1 / 0)
            real(bucket, *arguments, **keywords)

    monkeypatch.setattr(Bucket, "arrange", arrange)
    ranks, hosts = PLACES["2x2"]
    for rank, [error] in enumerate(outcomes(ranks, hosts, 1)):
        if rank == victim:
            assert isinstance(error, ZeroDivisionError)
        else:
            assert f"rank {victim} has ended with ZeroDivisionError" in str(error)
