"""The model of a step's costs: what it says of bytes is what was counted, and of time what must be so."""

import math

import numpy as np
import pytest

from bench import cost_fit, cost_model, cost_predictions
from bench.collectives import Hosts, allgather, allreduce, alltoall
from bench.cost_step import sizes, step

VALUES = 25_557_032
METHODS = ("none", "fp16", "1bit", "4bit", "8bit", "4bit-flat")
KERNELS = {f"{bits} {name}": 0.5 for bits in (1, 2, 4, 8, 16) for name in ("encode", "decode", "decode 2", "reduce 2")}
CONSTANTS = {
    **{"hand": 1.5, "copy": 0.3, "float16": 1.3, "bfloat16": 0.4, "inside": 0.2, "link": 1.02, "interface": 0.5},
    **{"cycle": 1.0, "call": 2.0, "message": 0.1, "far": 0.05, "idle": 0.15},
}

# Workers of each of two hosts: bits per value that an interface sent, for 9 million values over Open MPI.
COUNTED = {
    1: {"none": 32.1, "fp16": 16.0, "8bit-flat": 8.1, "4bit-flat": 4.1, "2bit-flat": 2.1},
    2: {"none": 32.1, "fp16": 16.0, "8bit-flat": 16.2, "4bit-flat": 8.2, "2bit-flat": 4.2},
    4: {"none": 32.1, "fp16": 16.0, "8bit-flat": 36.4, "4bit-flat": 18.9, "2bit-flat": 9.6},
    8: {"none": 32.1, "fp16": 16.1, "8bit-flat": 40.0, "4bit-flat": 38.1, "2bit-flat": 19.4},
}


def bits_leaving(method: str, values: int, hosts: Hosts) -> float:
    return 8 * step(method, values, hosts).transfer.leaving / values


@pytest.mark.parametrize("workers", COUNTED)
def test_flat_bytes_are_those_that_interfaces_counted(workers):
    for method, counted in COUNTED[workers].items():
        # Two of eight workers' gathers are just large enough for another algorithm.
        close = 0.06 if (workers, method) == (8, "8bit-flat") else 0.03
        assert bits_leaving(method, 9_000_000, Hosts(2, workers)) == pytest.approx(counted, rel=close), method


@pytest.mark.parametrize("hosts", [Hosts(2, 2), Hosts(2, 4), Hosts(4, 2), Hosts(16, 8), Hosts(128, 8)], ids=str)
@pytest.mark.parametrize("bits", [1, 4, 8])
def test_in_two_levels_a_host_sends_what_the_level_says(bits, hosts):
    goal = 2 * (hosts.number - 1) / hosts.number * bits
    sent = bits_leaving(f"{bits}bit", VALUES, hosts)
    assert goal < sent < goal + 0.15 * 2 * (hosts.number - 1) / hosts.number


@pytest.mark.parametrize("hosts", [Hosts(4, 1), Hosts(8, 1), Hosts(32, 1)], ids=str)
def test_in_one_level_a_lone_worker_sends_what_the_level_says(hosts):
    goal = 2 * (hosts.number - 1) / hosts.number * 4
    assert goal < bits_leaving("4bit", VALUES, hosts) < goal + 0.15 * 2
    assert step("4bit", VALUES, hosts) == step("4bit-flat", VALUES, hosts)


@pytest.mark.parametrize("nbytes", [100.0, 5_000.0, 100_000.0, 5e6])
@pytest.mark.parametrize(("number", "workers"), [(2, 1), (2, 3), (3, 2), (2, 8), (1, 8), (40, 8), (128, 8)])
def test_what_a_host_needs_comes_to_it(number, workers, nbytes):
    """As much leaves each host as arrives: at least what workers of other hosts have."""
    hosts = Hosts(number, workers)
    gathered = allgather(nbytes, hosts)
    assert gathered.leaving >= (hosts.ranks - hosts.workers) * nbytes
    assert (gathered.leaving > 0) == (gathered.far > 0) == (hosts.number > 1)
    assert allreduce(nbytes, hosts).leaving == 2 * nbytes * (hosts.number - 1) / hosts.number
    sent = alltoall(nbytes, 0, hosts.workers - 1, hosts)
    assert (sent.leaving, sent.staying) == (0, nbytes * (hosts.workers - 1))


def seconds(method: str, hosts: Hosts, gbit: float) -> float:
    return cost_model.seconds(step(method, VALUES, hosts), cost_predictions.machine(hosts, gbit), CONSTANTS, KERNELS)


@pytest.mark.parametrize("method", METHODS)
def test_a_slower_link_never_helps(method):
    for hosts in (Hosts(2, 1), Hosts(8, 4), Hosts(128, 8)):
        times = [seconds(method, hosts, gbit) for gbit in (0.1, 1, 10, 25, 100)]
        assert times == sorted(times, reverse=True) and times[0] > times[1] > times[2]


@pytest.mark.parametrize("method", ["none", "fp16", "4bit"])
def test_more_hosts_take_longer(method):
    for workers in (1, 2, 4):
        # Up to 63 workers: from there on Open MPI's alltoall is another, and then again the first.
        times = [seconds(method, Hosts(number, workers), 1) for number in (2, 4, 8) if number * workers < 64]
        assert times == sorted(times) and times[0] < times[-1]


def test_workers_who_share_a_core_take_longer():
    hosts, done = Hosts(2, 4), step("4bit", VALUES, Hosts(2, 4))
    times = [
        cost_model.seconds(done, cost_model.Machine(hosts, cores, 1e9), CONSTANTS, KERNELS) for cores in (1, 2, 4, 8)
    ]
    assert times[0] > times[1] > times[2] == times[3]


def test_latency_is_what_does_not_depend_on_bytes():
    done, place = step("4bit", VALUES, Hosts(128, 8)), cost_predictions.machine(Hosts(128, 8), 10)
    small = {**CONSTANTS, **dict.fromkeys(("hand", "copy", "float16", "bfloat16", "inside", "link", "idle"), 0.0)}
    nothing = dict.fromkeys(KERNELS, 0.0)
    assert cost_model.latency(done, place, CONSTANTS) == pytest.approx(cost_model.seconds(done, place, small, nothing))


def measurements(noise: float = 0.0) -> list[cost_fit.Point]:
    """Steps as the model has them, at 2 to 8 workers on two cores."""
    found, generator = [], np.random.default_rng(3)
    for hosts in (Hosts(1, 2), Hosts(2, 1), Hosts(4, 1), Hosts(8, 1), Hosts(2, 2), Hosts(2, 4), Hosts(4, 2)):
        for rate in (1e8, 1e9, 1e10, 1e11):
            place = cost_model.Machine(hosts, 2 / hosts.number, math.inf if hosts.number == 1 else rate)
            for method in ("alone", "none", "fp16", "1bit", "4bit", "8bit", "1bit-flat", "4bit-flat", "8bit-flat"):
                done = step(method, VALUES, hosts)
                took = cost_model.seconds(done, place, CONSTANTS, KERNELS) * generator.uniform(1 - noise, 1 + noise)
                found.append(cost_fit.Point((str(hosts), str(rate), method), done, place, took))
    return found


def test_the_fit_finds_the_constants_that_measurements_were_made_with():
    found = cost_fit.fit(measurements(), KERNELS).constants
    for name, value in CONSTANTS.items():  # "interface" is one of those that are tried, 8 % apart
        assert found[name] == pytest.approx(value, rel=0.08, abs=0.01), found


def test_the_fit_bears_noise_and_says_how_much():
    result = cost_fit.fit(measurements(noise=0.03), KERNELS)
    for name in ("hand", "copy", "link", "call"):
        assert abs(result.constants[name] - CONSTANTS[name]) < 4 * result.errors[name] + 0.05 * CONSTANTS[name], name
        assert 0 < result.errors[name] < 0.5 * CONSTANTS[name], name


def test_what_nothing_tells_is_named():
    points = [point for point in measurements() if point.machine.hosts.workers == 1]
    assert cost_fit.untold(points) == ["bfloat16", "inside"]
    assert cost_fit.untold(measurements()) == []


def test_larger_buckets_have_fewer_and_larger_messages():
    rows = cost_predictions.buckets(CONSTANTS, KERNELS, VALUES, 4)
    for smaller, larger in zip(rows, rows[1:], strict=False):
        assert smaller["bytes"]["between"] < larger["bytes"]["between"] and smaller["messages"] > larger["messages"]
        assert smaller["fitted"]["latency_ms"] > larger["fitted"]["latency_ms"] > larger["assumed"]["latency_ms"]
    # 8 MiB of float32 at 4 bits, a 1,024th of it; rounded up to whole buckets, and with a header.
    [usual] = [row for row in rows if row["bucket_mib"] == 8]
    assert 900 < usual["bytes"]["between"] < 1100
    assert sizes(4, VALUES, Hosts(128, 8)).between == pytest.approx(usual["bytes"]["between"], abs=1)


def test_values_travel_within_a_host_as_the_exchange_sends_them():
    section = VALUES / 13 / 4  # 13 buckets of 8 MiB
    codes = section / 2
    assert sizes(4, VALUES, Hosts(2, 4)) == pytest.approx((2 * section, codes, 2 * codes), rel=0.02)
    assert sizes(4, VALUES, Hosts(8, 4)) == pytest.approx((2 * section, codes / 8, codes), rel=0.02)
    assert sizes(16, VALUES, Hosts(8, 4)).scatter == pytest.approx(4 * section, rel=0.02)


def test_predictions_are_for_a_core_each_and_what_tcp_carries():
    place = cost_predictions.machine(Hosts(16, 8), 10)
    assert place.load == 1 and 9.5e9 < place.rate < 9.6e9


def test_every_layout_is_predicted_for_all():
    rows = cost_predictions.layouts(CONSTANTS, KERNELS, VALUES, 4)
    assert len(rows) == 7 * 4 * 4 and all(row["assumed_ms"]["1gbit"] <= row["ms"]["1gbit"] for row in rows)
    assert {(row["hosts"], row["workers"]) for row in rows} >= {(2, 1), (128, 8)}


def test_contenders_that_the_model_does_not_know():
    assert [step(name, VALUES, Hosts(2, 1)) for name in ("ddp", "powersgd1", "32bit", "dynamic")] == [None] * 4
