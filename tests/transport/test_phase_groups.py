"""The parts of collectives over a process group, without ranks: order of starts, and handles."""

import threading
import time
from concurrent.futures import Future
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_dyncomp.transport import torch_distributed
from hvd_dyncomp.transport.collective_handle import CollectiveHandle
from hvd_dyncomp.transport.phase_groups import OrderedLauncher, PhaseGroup, time_limit

pytestmark = pytest.mark.promise("DDP: all ranks start collectives in the same order.")

PHASES = ["local_scatter", "pair", "local_gather"]


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_each_phase_starts_in_the_order_of_the_first_and_nothing_is_held_for_ever(data):
    """Whatever the order in which later phases become due; things are exchanged again, in another order."""
    things = [f"bucket{i}" for i in range(data.draw(st.integers(1, 4)))]
    rounds = [data.draw(st.permutations(things)) for _ in range(data.draw(st.integers(1, 3)))]
    launcher, started = OrderedLauncher(PHASES), {phase: [] for phase in PHASES}

    def take(turn: int, thing: str, phase: str) -> None:
        launcher.enqueue(thing, phase, lambda: started[phase].append((turn, thing)))

    for turn, order in enumerate(rounds):
        due = []
        for thing in order:
            take(turn, thing, PHASES[0])
            due.append((thing, 1))
            while due and data.draw(st.booleans()):
                thing, phase = due.pop(data.draw(st.integers(0, len(due) - 1)))
                take(turn, thing, PHASES[phase])
                due += [(thing, phase + 1)] * (phase + 1 < len(PHASES))
        while due:
            thing, phase = due.pop(data.draw(st.integers(0, len(due) - 1)))
            take(turn, thing, PHASES[phase])
            due += [(thing, phase + 1)] * (phase + 1 < len(PHASES))
    expected = [(turn, thing) for turn, order in enumerate(rounds) for thing in order]
    assert started == dict.fromkeys(PHASES, expected)


def test_a_later_phase_waits_for_those_before_it_and_then_starts_at_once():
    launcher, started = OrderedLauncher(PHASES), []
    for thing in "abc":
        launcher.enqueue(thing, "local_scatter", lambda thing=thing: started.append(thing))
    for thing in "cb":
        launcher.enqueue(thing, "pair", lambda thing=thing: started.append(f"{thing} pair"))
    assert started == ["a", "b", "c"]
    launcher.enqueue("a", "pair", lambda: started.append("a pair"))
    assert started[3:] == ["a pair", "b pair", "c pair"]


class Group:
    """Passes for one of torch's backends: notes what is started in it."""

    def __init__(self, started: list, name: int) -> None:
        self._started, self._name = started, name

    def broadcast(self, tensor: torch.Tensor, root: int) -> str:
        assert root == self._name, "one group for what each of them sends"
        self._started.append((root, tensor))
        return f"from {root}"


@pytest.mark.parametrize("place", [0, 1])
def test_between_two_ranks_each_starts_to_receive_before_it_sends(place):
    started: list = []
    phase_group = PhaseGroup(place, tuple(Group(started, root) for root in (0, 1)))
    splits, arriving = ([2, 3], [2, 4]) if place == 0 else ([3, 2], [4, 2])
    sent = torch.arange(5, dtype=torch.uint8)
    works, received = phase_group.alltoall(sent, splits, arriving)
    assert works == [f"from {1 - place}", f"from {place}"]
    (_, room), (_, part) = started
    assert torch.equal(part, sent.split(splits)[1 - place]) and len(room) == 4
    room.fill_(9)
    kept, came = sent.split(splits)[place], torch.full((4,), 9, dtype=torch.uint8)
    assert torch.equal(received, torch.cat([kept, came] if place == 0 else [came, kept])), "with what it keeps"
    started.clear()
    phase_group.alltoall(sent, [5, 0] if place == 0 else [0, 5], [5, 0] if place == 0 else [0, 5])
    assert not started, "nothing to send, nothing to receive"


class Work:
    """Passes for one of torch's."""

    def __init__(self, error: str = "") -> None:
        self._error, self._future = error, Future()

    def get_future(self):
        return self._future

    def ends(self) -> None:
        self._future.set_result(None)

    def wait(self) -> None:
        assert self._future.done(), "who waits would be blocked for as long as torch likes"
        if self._error:
            raise RuntimeError(self._error + "\nand more")


SENT, RECEIVED = torch.zeros(2), torch.ones(3)


@pytest.fixture
def news() -> list[int]:
    return []


@pytest.fixture
def handle(news) -> CollectiveHandle:
    return CollectiveHandle("bucket.pair", SENT, lambda: news.append(1), in_order=False)


def test_it_is_over_when_both_works_are_and_tells_it_once(handle, news):
    one, other = Work(), Work()
    assert not handle.over and not handle.wait(0.01), "it waits for its turn"
    handle.start(lambda: ([one, other], RECEIVED))
    for work, over in ((other, False), (one, True)):
        assert not handle.over and not handle.wait(0) and not news
        work.ends()
        assert handle.over == over
    assert handle.wait(0) and handle.result() is RECEIVED and news == [1]


def test_nothing_to_send_is_over_at_once(handle):
    handle.start(lambda: ([], RECEIVED))
    assert handle.over and handle.wait(0) and handle.result() is RECEIVED


def test_what_is_queued_on_a_gpu_is_over_when_it_has_started():
    """Nobody asks whether it has come: who uses the result queues that."""
    handle, work = CollectiveHandle("it", SENT, lambda: None, in_order=True), Work()
    handle.start(lambda: ([work], RECEIVED))
    assert handle.over


def test_a_wait_ends_when_it_is_over_or_the_time_is(handle):
    began = time.monotonic()
    assert not handle.wait(0.1) and 0.1 <= time.monotonic() - began < 5
    work = Work()
    threading.Timer(0.05, handle.start, [lambda: ([work], RECEIVED)]).start()
    threading.Timer(0.1, work.ends).start()
    assert handle.wait(30) and time.monotonic() - began < 20


def test_a_second_part_starts_when_somebody_sees_the_end_of_the_first(handle):
    first, second, given = Work(), Work(), []
    handle.then = lambda result: given.append(result) or ([second], SENT)
    handle.start(lambda: ([first], RECEIVED))
    assert not handle.over and not given
    first.ends()
    assert not handle.over and given == [RECEIVED]
    assert not handle.over and not handle.wait(0) and len(given) == 1
    second.ends()
    assert handle.over and handle.result() is SENT and len(given) == 1


class Backend:
    """As torch's, whose options may tell a time limit, may tell none, or may not be there."""

    def __init__(self, minutes: float | None) -> None:
        if minutes is not None:
            self.options = SimpleNamespace(**({"_timeout": timedelta(minutes=minutes)} if minutes else {}))


def test_the_shortest_time_limit_holds_and_none_is_said(caplog):
    assert time_limit([Backend(5), Backend(2), Backend(0), Backend(None)], says=True) == timedelta(minutes=2)
    assert time_limit([Backend(0), Backend(None)], says=False) == timedelta(minutes=30)
    assert not caplog.text
    assert time_limit([Backend(0), Backend(None)], says=True) == timedelta(minutes=30)
    assert "for 30 minutes" in caplog.text


def broken():
    raise ValueError("it cannot start")


def test_what_cannot_start_is_an_error_where_it_is_waited_for(handle):
    """Not where it starts: the others wait for what starts next."""
    handle.then = lambda result: pytest.fail("there is no result")
    handle.start(broken)
    for _ in range(2):
        assert handle.over
        with pytest.raises(ValueError, match="it cannot start"):
            handle.result()


@pytest.mark.parametrize("part", ["first", "second", "starts"])
@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("Timed out waiting 1000ms for recv operation to complete", TimeoutError, "not all ranks joined"),
        ("Application timeout caused pair closure", TimeoutError, "not all ranks joined within the time limit"),
        ("Connection closed by peer", ConnectionError, "the connection to a rank was lost: Connection closed by peer;"),
    ],
)
def test_an_error_of_torch_says_what_it_means(handle, part, text, kind, words):
    first, second = Work(text if part == "first" else ""), Work(text)
    if part != "starts":
        handle.then = lambda result: ([second], SENT)
    handle.start(lambda: ([second if part == "starts" else first], RECEIVED))
    first.ends()
    second.ends()
    for _ in range(2):
        assert handle.over
        with pytest.raises(kind, match=f"^bucket.pair: {words}") as error:
            handle.result()
        assert "and more" not in str(error.value)


def test_what_is_no_matter_of_connections_stays_as_it_is(handle):
    """As where torch was built for another numpy, or a GPU has failed: to look at other ranks would help nobody."""
    work = Work("Numpy is not available")
    handle.start(lambda: ([work], RECEIVED))
    work.ends()
    with pytest.raises(RuntimeError, match="^Numpy is not available"):
        handle.result()
    with pytest.raises(RuntimeError, match="^Numpy is not available"), torch_distributed._connecting():
        raise RuntimeError("Numpy is not available")
    with pytest.raises(ConnectionError, match="not all ranks of the process group"), torch_distributed._connecting():
        raise RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:4711")
