"""What the meter says against what was handed to the network."""

import logging

import pytest
import torch
from simulated import WORLDS, Worker, noise, on_ranks, places

SIZES = {"a": 130, "b": 500, "small": 5}


@WORLDS
@pytest.mark.parametrize("bits", [1, 4, 32])
def test_the_meter_counts_what_is_sent(ranks, hosts, bits):
    def program(worker: Worker):
        for step in range(3):
            worker.step(worker.noise(step))
        worker.backward(worker.noise(3))
        worker.optimizer.synchronize()
        worker.optimizer.synchronize()  # reduces a second time
        return worker.quantizer.meter

    options = {"skip": lambda name, _: name == "skipped"}
    meters, world = on_ranks(ranks, program, {**SIZES, "skipped": 70}, bits, hosts=hosts, **options)
    share = 2 * (ranks - 1) / ranks
    for rank in range(ranks):
        total = meters[rank].total()
        # Of each sum the world counts whole bytes, and the meter the mean over ranks.
        sums = [s.tensor.numel() * s.tensor.element_size() for s in world.sent if s.rank == rank and s.kind == "sum"]
        rounded = sum(nbytes * share - int(nbytes * 2 * (ranks - 1) // ranks) for nbytes in sums)
        gathered = sum(
            len(s.tensor) // ranks * (ranks - 1) for s in world.sent if s.rank == rank and "attach" in s.name
        )
        assert total.sent_bytes == pytest.approx(world.bytes_sent[rank] + rounded - gathered)
        assert total.steps == 5 and set(meters[rank].records) == {(0, bits), (0, 32)}
        float32 = 5 * 4 * 705 * share
        assert total.float32_bytes == pytest.approx(float32)
        assert total.seconds > 0


@WORLDS
@pytest.mark.parametrize("where", ["one rank", "all ranks"])
def test_blocks_that_are_not_finite_are_nan_on_all_ranks(ranks, hosts, where):
    """Whoever has them, and how many. Blocks 1 and 9 of 10: in the shards of different ranks."""

    def program(worker: Worker):
        gradient = noise("a", 640, worker.transport.rank, 0)
        if where == "all ranks" or worker.transport.rank == 1:
            gradient[64 + 3 : 64 + 6] = float("nan")
            gradient[9 * 64] = float("inf")
        return worker.step({"a": gradient})["a"].view(10, 64)

    results, _ = on_ranks(ranks, program, {"a": 640}, 4, hosts=hosts)
    for got in results:
        assert got.isnan().all(dim=1).tolist() == [block in (1, 9) for block in range(10)]
        assert got[[0, *range(2, 9)]].isfinite().all()


@places("2")
def test_a_tensor_that_is_no_gradient_passes(ranks, hosts, caplog):
    def program(worker: Worker):
        tensor = torch.arange(12.0)
        for _ in range(2):
            wire, context = worker.quantizer.compress(tensor)
            assert wire is tensor and worker.quantizer.decompress(wire, context) is tensor
        return worker.quantizer.meter.records

    records, _ = on_ranks(ranks, program, SIZES, 4, hosts=hosts)
    assert records == [{}, {}]
    assert caplog.text.count("travels uncompressed") == ranks, "once a quantizer"


@places("2", "3")
@pytest.mark.parametrize("twice", [True, False])
def test_a_second_reduction_is_said_once(ranks, hosts, twice, caplog):
    """A lost `skip_synchronize`: all travels again, uncompressed. A step without any gradient is no such thing."""

    def program(worker: Worker):
        for step in range(3):
            worker.backward(worker.noise(step))
            worker.optimizer.synchronize()
            if twice:
                worker.optimizer.synchronize()
            worker.optimizer.step()
        worker.optimizer.step()

    with caplog.at_level(logging.WARNING):
        on_ranks(ranks, program, SIZES, 4, hosts=hosts)
    assert caplog.text.count("with optimizer.skip_synchronize(): optimizer.step()") == twice
