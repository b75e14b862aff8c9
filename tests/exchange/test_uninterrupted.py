"""Signal handlers wait while `uninterrupted` works, and are all in their place afterwards, whenever a signal comes."""

import signal
import sys

import pytest

from hvd_dyncomp.exchange import uninterrupted
from hvd_dyncomp.exchange.uninterrupted import uninterrupted as undisturbed


class Interrupted(BaseException):
    pass


@pytest.fixture
def raising():
    """Two signals whose handler raises."""

    def handler(number, frame):
        raise Interrupted(number)

    before = {number: signal.signal(number, handler) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    yield handler
    for number, one in before.items():
        signal.signal(number, one)


def in_place(handler) -> bool:
    return all(signal.getsignal(number) is handler for number in (signal.SIGUSR1, signal.SIGUSR2))


def test_what_a_handler_raises_comes_when_the_work_is_over(raising):
    done = []

    def inner():
        signal.raise_signal(signal.SIGUSR1)
        done.append("inner")

    def work():
        signal.raise_signal(signal.SIGUSR2)
        undisturbed(inner)
        done.append("outer")

    with pytest.raises(Interrupted):
        undisturbed(work)
    assert done == ["inner", "outer"]
    assert in_place(raising)


def test_an_error_of_the_work_is_raised(raising):
    with pytest.raises(ValueError, match="of the work"):
        undisturbed(lambda: int("of the work"))
    assert in_place(raising)
    assert undisturbed(lambda: 5) == 5


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_at_every_bytecode(raising, number):
    """The work is done to its end or not begun; handlers are back; nobody is deaf to a signal that has come."""
    at = 0
    while True:
        begun, ended, left = [], [], at

        def at_opcode(frame, event, argument):
            nonlocal left
            if frame.f_code.co_filename != uninterrupted.__file__:
                return None
            frame.f_trace_opcodes = True
            if event == "opcode":
                left -= 1
                if left == -1:
                    signal.raise_signal(number)
            return at_opcode

        def work(begun=begun, ended=ended):
            begun.append(1)
            ended.append(1)

        before, interrupted = sys.gettrace(), False
        sys.settrace(at_opcode)
        try:
            undisturbed(work)
        except Interrupted:
            interrupted = True
        finally:
            sys.settrace(before)
        assert begun == ended
        assert in_place(raising), f"at bytecode {at}"
        assert interrupted == (left < 0), f"at bytecode {at}"
        if left >= 0:
            break
        at += 1
    assert at > 50
