"""Counting by epoch and level."""

import json
from types import SimpleNamespace

import pytest

from hvd_dyncomp import Meter, Traffic
from hvd_dyncomp.meter import allreduce_bytes


def filled() -> Meter:
    meter = Meter()
    meter.at(0, 4).sent_bytes += 120
    meter.at(0, 4).float32_bytes += 1000
    meter.at(1, 4).sent_bytes += 50
    meter.at(1, 32).sent_bytes += 1000
    meter.at(1, 32).float32_bytes += 1000
    return meter


def test_sums_by_epoch_by_level_and_in_all():
    meter = filled()
    assert meter.epoch(0).sent_bytes == 120 and meter.epoch(1).sent_bytes == 1050
    assert meter.level(4).sent_bytes == 170 and meter.level(32).sent_bytes == 1000
    assert meter.total() == Traffic(1170, 2000)
    assert meter.epoch(7) == Traffic()


def test_what_is_saved_is_of_everything():
    assert filled().epoch(0).saved_fraction == pytest.approx(0.88)
    assert Traffic().saved_fraction == 0


def test_more_than_float32_is_not_said_to_be_less():
    meter = Meter()
    meter.at(0, 32).sent_bytes, meter.at(0, 32).float32_bytes = 1030, 1000
    assert repr(meter).endswith(" 3.0% more than float32>") and "% less than" in repr(filled())


def test_state_survives_json():
    meter, other = filled(), Meter()
    other.at(9, 8).steps = 5
    other.load_state_dict(json.loads(json.dumps(meter.state_dict())))
    assert other.records == meter.records


def test_a_ring_allreduce_sends_almost_twice():
    assert [allreduce_bytes(100, n) for n in (1, 2, 4)] == [0, 100, 150]


def test_the_share_that_was_waited_is_of_the_time_since_the_latest_call(monkeypatch):
    now = 100.0
    monkeypatch.setattr("hvd_dyncomp.meter.time", SimpleNamespace(perf_counter=lambda: now))
    meter = Meter()
    meter.at(0, 4).waited_seconds += 1
    now += 10
    assert meter.waited() == pytest.approx(0.1)
    meter.at(0, 4).waited_seconds += 1
    meter.at(1, 8).waited_seconds += 2
    now += 4
    assert meter.waited() == pytest.approx(0.75)
    now += 4
    assert meter.waited() == 0 and meter.waited() == 0  # no time at all has passed


def test_what_a_loaded_run_has_waited_is_not_of_this_one(monkeypatch):
    now = 0.0
    monkeypatch.setattr("hvd_dyncomp.meter.time", SimpleNamespace(perf_counter=lambda: now))
    before, meter = Meter(), Meter()
    before.at(0, 4).waited_seconds += 50
    now += 100
    meter.load_state_dict(before.state_dict())
    meter.at(1, 4).waited_seconds += 1
    now += 10
    assert meter.waited() == pytest.approx(0.1) and meter.total().waited_seconds == 51
