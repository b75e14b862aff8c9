"""What a signal handler raises, put at any call: what interrupts a program cannot be timed, but it can be counted."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import hvd_dyncomp

PACKAGE = str(Path(hvd_dyncomp.__file__).parent)
HOROVOD = str(Path(hvd_dyncomp.__file__).parent / "transport")  # its waits are interrupted by nobody


class Interrupted(BaseException):
    """As KeyboardInterrupt."""


class Interruption:
    """Interrupts, within a `with` block and this thread, the `number`-th call of a function of the package.

    Args:
        number: counted from 0; -1 for never.
        interrupt: has the handler called, which raises `Interrupted`.
        spared: functions of which no call counts, nor what they call.
        torchs: functions that torch calls, of which no call is interrupted: what is raised there is torch's.

    Attributes:
        calls: how many there have been.
        hit: whether it has interrupted one: not a function of torch's, and not where a generator is only closed.
    """

    def __init__(
        self,
        number: int,
        interrupt: Callable[[], None],
        spared: tuple[str, ...] = (),
        torchs: tuple[str, ...] = (),
    ) -> None:
        self.number, self._interrupt, self._spared, self._torchs = number, interrupt, spared, torchs
        self.calls, self.hit = 0, False

    def __enter__(self) -> Interruption:
        self._before = sys.gettrace()  # as when coverage is measured
        sys.settrace(self._at_call)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before)

    def _at_call(self, frame: FrameType, event: str, argument: object) -> Callable | None:
        name = frame.f_code.co_filename
        if not name.startswith(PACKAGE) or name.startswith(HOROVOD) or self._is_spared(frame):
            return None
        self.calls += 1
        return self._at_line if self.calls - 1 == self.number else None

    def _at_line(self, frame: FrameType, event: str, argument: object) -> Callable | None:
        """At its first line: Python 3.11 loses count of its stack when a function raises in place of being called."""
        if event == "line" and not self.hit and frame.f_code.co_name not in self._torchs:
            self.hit = True
            self._interrupt()
        return self._at_line

    def _is_spared(self, frame: FrameType | None) -> bool:
        while frame is not None:
            if frame.f_code.co_name in self._spared:
                return True
            frame = frame.f_back
        return False
