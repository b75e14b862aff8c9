"""What goes wrong on one rank within a step: all ranks hear of it, in words. Nobody waits for ever or goes on."""

import re

import pytest
import torch
from coded import HEADER_BYTES
from interruption import Interrupted, Interruption
from simulated import PLACES, RecordingWorld, Worker, mean_of, noise, phases, places

from hvd_dyncomp import LockstepError
from hvd_dyncomp.averaging import Averager
from hvd_dyncomp.exchange.buckets import Bucket
from hvd_dyncomp.exchange.reduction import PairReduction, ShardedReduction
from hvd_dyncomp.exchange.residuals import Residuals
from hvd_dyncomp.exchange.routes import Hierarchical
from hvd_dyncomp.simulate import Deadlock

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
STRIDE = 17  # of the calls that are interrupted: of up to 1,900, a whole run for each takes minutes
BACKGROUND = ("_work_in_background",)  # of all ranks, by whoever has the turn; in training it has a thread of its own


def noises(rank: int, step: int) -> dict[str, torch.Tensor]:
    return {name: noise(name, size, rank, step) for name, size in SIZES.items()}


def outcomes(ranks: int, hosts, steps: int, at=None, world: RecordingWorld | None = None, bits: float = 16) -> list:
    """Per rank and step, the means or the error. `at(averager, step)` is called before each step."""

    def program(transport):
        named = [(name, torch.zeros(size)) for name, size in SIZES.items()]
        averager = Averager(named, bits, transport=transport, block_size=64)
        seen = []
        for step in range(steps):
            given = noises(transport.rank, step)
            try:
                with at(transport.rank, step) if at else Interruption(-1, interrupt):
                    averager.mean_(list(given.values()))
                seen.append(given)
            except (MemoryError, Interrupted, ZeroDivisionError, RuntimeError) as error:
                assert not isinstance(error, Deadlock), error
                seen.append(error)
        return seen

    return (world or RecordingWorld(ranks, hosts=hosts)).run(program)


def interrupt() -> None:
    raise Interrupted


def assert_final(error: object, cause: str) -> None:
    assert re.fullmatch(
        rf"(a step|step \d+) was interrupted by .*{cause}.*\. Gradients and residuals may be only partly "
        "updated: restart all ranks from a checkpoint",
        str(error),
    ), error


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in SIZES)


def is_reached(point: str, names: list[str]) -> bool:
    """Whether a rank comes to a point, when these are the phases."""
    needs = {"prepare": "local_scatter", "sum": "local_scatter", "reduce": "gather"}
    return needs.get(point, names[0]) in names


CASES = [(place, point) for place in HERE for point in POINTS if is_reached(point, phases(*PLACES[place]))]


@pytest.mark.promise("An error within a step ends the run on every rank, with a message that says why.")
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

        def at(rank, step, victim=victim, step_of_victim=step_of_victim):
            if rank == victim:
                step_of_victim[:] = [step]
            return Interruption(-1, interrupt)

        with monkeypatch.context() as patch:
            for owner, name in POINTS[point]:
                patch.setattr(owner, name, without_room(getattr(owner, name)))
            seen = outcomes(ranks, hosts, steps + 2, at)
        for rank, results in enumerate(seen):
            *before, here, after, later = results
            assert all(isinstance(one, dict) for one in before)
            if rank == victim:
                assert isinstance(here, MemoryError), here
            else:
                told = here if isinstance(here, Exception) else after  # after all is sent, means are right
                assert isinstance(told, LockstepError), told
                assert f"rank {victim} aborted step {steps - 1}: MemoryError: no room" in str(told)
                if isinstance(here, dict):
                    assert point == "decode"
                    for name, size in SIZES.items():
                        expected = mean_of(name, size, steps - 1, range(ranks), ranks)
                        assert (here[name] - expected).norm() <= 2e-3 * expected.norm()
            for error in (after, later) if isinstance(here, Exception) else (later,):
                assert_final(error, "no room")


@pytest.mark.promise("An error within a step ends the run on every rank, with a message that says why.")
@places("2", "3", "2x2")
@pytest.mark.parametrize("level", [4, 32], ids=["compressed", "released"])
def test_an_averager_that_is_interrupted_at_any_call(ranks, hosts, level):
    def run(number: int):
        here = Interruption(number, interrupt, BACKGROUND)
        quiet = [Interruption(-1, interrupt) for _ in range(ranks)]
        seen = outcomes(ranks, hosts, 3, lambda rank, step: here if (rank, step) == (0, 1) else quiet[rank], bits=level)
        return seen, here

    expected, never = run(-1)
    assert never.calls > 50
    for number in range(1, never.calls, STRIDE):
        (first, *others), here = run(number)
        if not here.hit:
            assert same(first[1], expected[0][1])
            continue
        assert isinstance(first[1], Interrupted), number
        assert_final(first[2], "Interrupted")
        for rank, results in enumerate(others, 1):
            assert isinstance(results[1], LockstepError) or same(results[1], expected[rank][1]), (number, results)
            said = next(str(error) for error in results if isinstance(error, Exception))
            assert re.search(r"rank 0 aborted (a step|step 1): Interrupted", said), (number, said)
            assert isinstance(results[2], RuntimeError), number


@pytest.mark.promise("An error within a step ends the run on every rank, with a message that says why.")
@places("2", "3", "2x2")
@pytest.mark.parametrize("level", [4, 32], ids=["compressed", "released"])
def test_horovod_s_optimizer_that_is_interrupted_at_any_call(ranks, hosts, level):
    """The job ends with the process, and until then no step of it begins."""

    def run(number: int):
        here, seen = Interruption(number, interrupt, BACKGROUND), {}

        def program(transport) -> None:
            worker = Worker(transport, {**SIZES, "c": 130, "d": 5}, 4, bucket_bytes=600)
            worker.step(worker.noise(0))
            worker.set_level(level)
            try:
                with here if transport.rank == 0 else Interruption(-1, interrupt):
                    seen[transport.rank] = worker.step(worker.noise(1))
            except Interrupted:
                worker.optimizer.forget()
                if worker.quantizer._failure:  # otherwise nothing was begun, or all was over
                    with pytest.raises(RuntimeError) as error:
                        worker.step(worker.noise(2))
                    assert_final(error.value, "Interrupted")
                raise
            except RuntimeError as error:
                seen[transport.rank] = error
                raise

        world = RecordingWorld(ranks, hosts=hosts)
        try:
            world.run(program)
        except Interrupted:
            assert here.hit
        else:
            assert not here.hit
        return seen, here.calls

    expected, calls = run(-1)
    assert calls > 50
    for number in range(1, calls, STRIDE):
        seen, _ = run(number)
        for rank in range(1, ranks):
            if isinstance(seen[rank], dict):
                assert all(torch.equal(seen[rank][name], mean) for name, mean in expected[rank].items()), number
            else:
                assert "rank 0 has ended with Interrupted()" in str(seen[rank]), (number, seen[rank])


class Interrupting(RecordingWorld):
    """Rank 0 is interrupted when it has to wait for a handshake."""

    def block(self, rank, collective):
        if rank == 0 and collective.name.endswith("handshake") and not collective.over:
            raise Interrupted
        super().block(rank, collective)


def test_an_interruption_while_a_late_rank_is_waited_for():
    first, *others = outcomes(3, (), 2, world=Interrupting(3))
    assert isinstance(first[0], Interrupted)
    assert_final(first[1], "Interrupted")
    for results in others:
        assert "rank 0 aborted step 0: Interrupted" in str(results[0]), results


def test_an_interruption_of_a_rank_that_tells_the_others_of_its_error():
    """Its error has not reached them: they hear of the interruption, and do not wait."""

    def program(transport) -> BaseException:
        averager = Averager([("a", torch.zeros(650))], 4, transport=transport)
        with pytest.raises((Interrupted, LockstepError)) as error:
            averager.mean_([] if transport.rank == 0 else [torch.ones(650)])
        return error.value

    first, *others = Interrupting(3).run(program)
    assert isinstance(first, Interrupted)
    for error in others:
        assert isinstance(error, LockstepError) and "rank 0 aborted step 0: Interrupted" in str(error), error


def test_alone_a_wrong_argument_changes_nothing():
    def program(transport):
        averager = Averager([("a", torch.zeros(2000))], 4, transport=transport)
        for _ in range(2):
            with pytest.raises(TypeError, match="tensors must be a sequence of 1 tensors"):
                averager.mean_([])
        averager.mean_([torch.ones(2000)])

    RecordingWorld(1).run(program)


class Damaging(RecordingWorld):
    """From when `now` has something, what one rank sends in one phase has a wrong step in its headers' first."""

    def __init__(self, ranks, hosts, phase: str, culprit: int) -> None:
        super().__init__(ranks, hosts=hosts)
        self.phase, self.culprit, self.now = phase, culprit, []

    def begin(self, rank: int, step: int) -> Interruption:
        if rank == self.culprit and step == 1:
            self.now.append(step)
        return Interruption(-1, interrupt)

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
        errors = [error for error in here if isinstance(error, LockstepError)]
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
    errors = {rank: str(results[1]) for rank, results in enumerate(seen) if isinstance(results[1], LockstepError)}
    assert refused <= set(errors), seen
    assert all("bytes arrived, expected" in text for text in errors.values()), errors


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
    for rank, [error] in enumerate(outcomes(ranks, hosts, 1)):
        if rank == victim:
            assert isinstance(error, ZeroDivisionError)
        else:
            assert f"rank {victim} aborted step 0: ZeroDivisionError" in str(error)
