"""The connections of a process group's ranks, without the group."""

import socket
import threading

import torch

from hvd_dyncomp.transport.mesh import Mesh

KEY = b"k" * 16


def room(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def test_what_was_posted_before_the_end_is_sent_whatever_wakes_the_thread():
    """It has not looked at what was posted when it learns that it is to end, as a message has just kept it busy."""
    ours, theirs = socket.socketpair()
    busy, go_on, came, received = threading.Event(), threading.Event(), threading.Event(), []

    def keeps_busy(*message) -> None:
        busy.set()
        go_on.wait(10)

    def keep(rank: int, key: bytes, body: torch.Tensor) -> None:
        received.append((rank, key, body.tolist()))

    leaving = Mesh({1: theirs}, keeps_busy, lambda rank, error: None, room)
    staying = Mesh({0: ours}, keep, lambda rank, error: came.set(), room)
    staying.post(0, KEY, torch.zeros(1, dtype=torch.uint8), lambda: None)
    assert busy.wait(10)
    leaving.post(1, KEY, torch.arange(5, dtype=torch.uint8), lambda: None)
    closing = threading.Thread(target=leaving.close)
    closing.start()
    while leaving._until is None:
        pass
    go_on.set()
    closing.join(10)
    assert came.wait(10), "the rank that stays is told that the other has left"
    staying.close()
    assert received == [(0, KEY, [0, 1, 2, 3, 4])]
