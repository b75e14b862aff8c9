"""The thread for what goes on beside the program."""

import threading
import time

from hvd_dyncomp.transport.background import Background


def test_work_is_called_until_it_is_over():
    """Also what comes when all before it is over, and the thread sleeps."""
    background, calls = Background(lambda: time.sleep(0.001)), []
    for name, times in (("a", 2), ("b", 5), ("c", 1)):
        over = threading.Event()

        def work(name=name, times=times, over=over) -> bool:
            calls.append(name)
            if calls.count(name) == times:
                over.set()
            return over.is_set()

        background.add(work)
        assert over.wait(10)
        time.sleep(0.02)  # it would be called again
    assert calls == ["a"] * 2 + ["b"] * 5 + ["c"]
