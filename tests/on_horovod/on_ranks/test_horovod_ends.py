"""Horovod's thread ends while a rank goes on asking: the one frees what is queued, the other holds Python's lock."""

import itertools

import horovod.torch as hvd
import pytest
import torch
from horovod.common.exceptions import HorovodInternalError

from hvd_dyncomp.transport.horovod import HorovodTransport


def test_requests_raise_and_nobody_waits(rank, size):
    transport = HorovodTransport()
    hvd.barrier()
    if rank == 1:
        hvd.shutdown()
        return
    one = torch.uint8
    with pytest.raises(HorovodInternalError):
        for number in itertools.count():
            transport.sum(torch.zeros(1), f"sum.{number}")
            transport.allgather(torch.zeros(1, dtype=one), f"allgather.{number}")
            transport.alltoall(torch.zeros(size, dtype=one), range(size), [1] * size, [1] * size, f"alltoall.{number}")
    hvd.shutdown()


def test_who_hears_of_it_may_ask_at_once():
    """Whatever else is queued: here, what Python alone owns."""
    hvd.init()
    transport = HorovodTransport()
    if hvd.rank() == 1:
        hvd.barrier()
        hvd.shutdown()
        return
    heard_of = transport.sum(torch.zeros(1), "heard of")
    queued = [hvd.allreduce_async_(torch.zeros(1), name=f"queued.{number}") for number in range(200)]
    hvd.barrier()  # the other one leaves only now: to queue these meanwhile would be what hangs
    with pytest.raises(HorovodInternalError):
        transport.wait(heard_of)
    assert queued
    with pytest.raises(HorovodInternalError):
        transport.sum(torch.zeros(1), "at once")
