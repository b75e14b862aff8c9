"""The thread for what goes on beside the program."""

import logging
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


def test_what_fails_is_over_and_what_is_beside_it_goes_on(caplog):
    """Horovod may be shut down with a step in flight: the program hears of it from its own calls."""
    background, over, calls = Background(lambda: time.sleep(0.001)), threading.Event(), []

    def fails() -> bool:
        calls.append("fails")
        raise ValueError("Horovod has not been initialized")

    def other() -> bool:
        calls.append("other")
        if calls.count("other") == 5:
            over.set()
        return over.is_set()

    with caplog.at_level(logging.DEBUG, logger="hvd_dyncomp"):
        background.add(other)
        background.add(fails)
        assert over.wait(10)
    assert calls.count("fails") == 1
    own = [record.levelname for record in caplog.records if record.name.endswith("background")]
    assert own == ["DEBUG"]


def test_several_threads_that_add_work_at_once_start_one(monkeypatch):
    """`stop` ends one, and joins it; a second one would be joined for ever when Python exits."""
    started = []

    class Slow(threading.Thread):
        def start(self) -> None:
            started.append(self)
            time.sleep(0.05)
            super().start()

    background, over = Background(lambda: time.sleep(0.001)), [threading.Event() for _ in range(8)]
    adders = [
        threading.Thread(target=background.add, args=(lambda event=event: event.set() or True,)) for event in over
    ]
    monkeypatch.setattr(threading, "Thread", Slow)
    for adder in adders:
        adder.start()
    for adder, event in zip(adders, over, strict=True):
        adder.join(10)
        assert event.wait(10)
    assert len(started) == 1
    background.stop()
    assert not started[0].is_alive()
