"""What only hosts of several workers have. For four ranks, which say themselves on which host they are.

Gradients that bfloat16 can hold are not rounded on their way within a host, so that sums of them are exact.
"""

from __future__ import annotations

import logging

import horovod.torch as hvd
import pytest
import torch
from placement import place
from problem import Problem, assert_close, float64_sum, same_on_all_ranks, undelivered

from hvd_dyncomp import Controller, DynamicQuantizer, LockstepError, Schedule, Static, kernels
from hvd_dyncomp.exchange.routes import Hierarchical

BLOCKS, ROUND_ROBIN, CROSSED = [0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 1, 0]
TWO_BY_TWO = {"blocks": BLOCKS, "round robin": ROUND_ROBIN, "crossed": CROSSED}
UNEVEN, ONE_HOST, APART = [0, 0, 0, 1], [0] * 4, [0, 1, 2, 3]
PLACEMENTS = {**TWO_BY_TWO, "uneven": UNEVEN, "one host": ONE_HOST, "apart": APART}
# Relative errors of sums of 30 steps, as tests/kernels/test_kernels.py has them for the flat exchange of two.
LIMITS = {1: 0.20, 4: 0.037, 8: 0.0025, 16: 1e-5}
NAMES = ["conv", "odd", "matrix", "long"]

everywhere = pytest.mark.parametrize("hosts", PLACEMENTS.values(), ids=PLACEMENTS)
two_by_two = pytest.mark.parametrize("hosts", TWO_BY_TWO.values(), ids=TWO_BY_TWO)
pytestmark = pytest.mark.timeout(120, method="thread")


@pytest.fixture
def at(monkeypatch):
    return lambda hosts: place(monkeypatch, hosts)


class Run:
    """A quantizer with its problem, and what went in and came out."""

    def __init__(self, prefix: str, policy, names=NAMES, **arguments) -> None:
        self.quantizer = DynamicQuantizer(Controller(policy), **{"bucket_bytes": 30_000, **arguments})
        self.prefix = f"{prefix}."
        self.problem = Problem(names=names, prefix=self.prefix, compression=self.quantizer)
        self._own = {name: [0.0, 0.0] for name in names}  # this rank's gradients, and their magnitudes
        self._delivered = dict.fromkeys(names, 0.0)

    def steps(self, *seeds: int, precision: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
        """Returns the last one's means."""
        for seed in seeds:
            wanted = self.problem.draw(seed, precision)
            reduced = self.problem.reduce(wanted)
            for name, gradient in wanted.items():
                self._own[name][0] += gradient.double()
                self._own[name][1] += gradient.double().abs()
                self._delivered[name] += hvd.size() * reduced[name].double()
        return reduced

    def follow(self, before: Run) -> None:
        """Takes over what another run owes, and its sums."""
        self.quantizer.load_state_dict(before.quantizer.state_dict())
        self._own, self._delivered = before._own, before._delivered

    def sums(self, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of what came out, of what all ranks put in, and of its magnitude; each in float64."""
        put_in, magnitude = float64_sum(torch.stack(self._own[name]).numpy(), f"sums.{name}")
        return self._delivered[name], torch.from_numpy(put_in), torch.from_numpy(magnitude)

    def owed(self, name: str) -> torch.Tensor:
        """What all ranks' residuals hold."""
        return undelivered(self.quantizer, self.prefix + name, self._delivered[name].shape)


@pytest.mark.parametrize("bits", [4, 16, 32])
@everywhere
def test_the_mean_arrives_wherever_the_ranks_are(hosts, bits, at, request):
    at(hosts)
    run = Run(request.node.name, Static(bits))
    for step in range(3):
        reduced = run.steps(step, precision=torch.float32)
        assert same_on_all_ranks(reduced.values(), f"reduced.{step}")
    for name in NAMES:
        delivered, put_in, _ = run.sums(name)
        assert_close(delivered, put_in, bits)


@pytest.mark.parametrize("bits", [1, 4, 8, 16])
@two_by_two
def test_what_leaves_a_host_is_what_the_level_says(hosts, bits, at, rank, request):
    """And what stays is values in bfloat16, or in float32 at 8 and 16 bits, and codes."""
    at(hosts)
    run = Run(request.node.name, Static(bits), names=["large"])
    run.steps(1)
    traffic = run.quantizer.meter.total()
    counted = [[traffic.leaving_bytes, traffic.staying_bytes] if place == hosts[rank] else [0, 0] for place in (0, 1)]
    hosts_bits = hvd.allreduce(torch.tensor(counted), op=hvd.Sum, name="counted") * 8 / 50_000
    within = 16 if bits <= 7 else 32
    for leaving, staying in hosts_bits:
        assert bits <= leaving <= bits + 0.15
        # A worker hands on the codes of both hosts for its section.
        assert within + 2 * bits <= staying <= within + 2 * bits + 0.3


@pytest.mark.parametrize("bits", [1, 4, 8, 16])
def test_what_is_rounded_within_a_host_is_small_and_all_that_is_lost(bits, at, request):
    at(BLOCKS)
    run = Run(request.node.name, Static(bits))
    run.steps(1, 2, 3, precision=torch.float32)
    for name in NAMES:
        delivered, put_in, magnitude = run.sums(name)
        owed = run.owed(name)
        lost = (put_in - delivered - owed).abs()
        kept = 3 * 2**-6 * owed.abs().max()  # residuals are bfloat16
        assert (lost <= 2e-6 * magnitude.max() + kept + (magnitude * 2**-8 if bits <= 7 else 0)).all(), name


def reduced(prefix: str, steps: int = 3, **arguments) -> torch.Tensor:
    """All means of the last of some steps."""
    return torch.cat([mean.flatten() for mean in Run(prefix, Static(4), **arguments).steps(*range(steps)).values()])


@two_by_two
def test_the_demand_for_the_flat_way(hosts, at, request):
    """The flat way knows nothing of hosts; the other is the default."""
    at(ONE_HOST)
    flat = reduced(f"{request.node.name}.flat")
    at(hosts)
    assert torch.equal(reduced(f"{request.node.name}.false", hierarchical=False), flat)
    assert not torch.equal(reduced(f"{request.node.name}.none"), flat)


@pytest.mark.parametrize("hierarchical", [None, False])
@everywhere
def test_uneven_hosts_are_mentioned_once(hosts, hierarchical, at, rank, request, caplog):
    at(hosts)
    with caplog.at_level(logging.WARNING, logger="hvd_dyncomp"):
        reduced(request.node.name, hierarchical=hierarchical)
    said = [record.getMessage() for record in caplog.records if "workers" in record.getMessage()]
    expected = rank == 0 and hosts == UNEVEN and hierarchical is None
    assert len(said) == expected, said
    assert not said or "hosts have different numbers of workers: 3, 1" in said[0]


@pytest.mark.parametrize(("first", "other"), [(None, False), (False, None)])
def test_ranks_that_want_different_ways(first, other, at, rank, request):
    at(BLOCKS)
    run = Run(request.node.name, Static(4), hierarchical=other if rank == 2 else first)
    with pytest.raises(LockstepError, match=f"rank 0 has hierarchical {first}, rank 2 has {other}"):
        run.steps(1)
    assert torch.equal(hvd.allreduce(torch.ones(1), name="still alive"), torch.ones(1))


@pytest.mark.parametrize("bits", [4, 32])
@pytest.mark.parametrize("hosts", [BLOCKS, UNEVEN, ONE_HOST])
def test_a_rank_that_is_on_another_host_later(hosts, bits, at, request):
    at(hosts)
    run = Run(request.node.name, Static(bits))
    run.steps(1, 2)
    at([*hosts[:3], 7 if hosts.count(hosts[3]) > 1 else hosts[0]])
    with pytest.raises(LockstepError, match=r"rank 0 has trained .* other hosts than now: .* are \[\[.*3.*\]\]"):
        run.steps(3)
    assert torch.equal(hvd.allreduce(torch.ones(1), name="still alive"), torch.ones(1))


def test_hosts_may_be_called_something_else_later(at, request):
    at(BLOCKS)
    run = Run(request.node.name, Static(16))
    run.steps(1)
    at([5, 5, 3, 3])
    run.steps(2)
    delivered, put_in, _ = run.sums("long")
    assert_close(delivered, put_in, 16)


@pytest.mark.timeout(240)
def test_sums_of_thirty_steps(at, request):
    """No further from the exact mean than those of the flat exchange, and than its limits."""
    errors = {}
    for way, hosts in {"flat": ONE_HOST, "by host": BLOCKS}.items():
        at(hosts)
        for bits in (0.25, 1, 4, 8, 16):
            run = Run(f"{request.node.name}.{way}.{bits}", Static(bits), names=["large"], bucket_bytes=2**23)
            run.steps(*range(30), precision=torch.float32)
            delivered, put_in, _ = run.sums("large")
            errors[way, bits] = float((delivered - put_in).norm() / put_in.norm())
    print({key: f"{error:.2g}" for key, error in errors.items()}, flush=True)
    for (way, bits), error in errors.items():
        if way == "by host":
            assert error <= LIMITS.get(bits, 1), bits
            assert error <= errors["flat", bits], bits


@two_by_two
def test_nothing_is_owed_after_a_release_whatever_was_before(hosts, at, request):
    at(hosts)
    levels = [4, 1, 32, 32, 16, 2, 32, 8, 3, 32, 5, 32]
    run = Run(request.node.name, Schedule(dict(enumerate(levels))))
    most = dict.fromkeys(NAMES, 0.0)
    for epoch, bits in enumerate(levels):
        means = run.steps(2 * epoch, 2 * epoch + 1)
        assert same_on_all_ranks(means.values(), f"means.{epoch}")
        for name in NAMES:
            delivered, put_in, magnitude = run.sums(name)
            owed = float((put_in - delivered).abs().max() / magnitude.max())
            # Of what was owed, which is bfloat16, a small part is gone.
            assert (owed <= 3e-6 + 2**-5 * most[name]) if bits == 32 else (owed > 1e-6), (name, epoch, bits)
            most[name] = max(owed, most[name])
        run.quantizer.controller.step({})


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@two_by_two
def test_resume_equals_no_interruption(hosts, rounding, at, request):
    at(hosts)
    whole, before, after = (Run(request.node.name, Static(2), rounding=rounding) for _ in range(3))
    whole.steps(0, 1, 2)
    before.steps(0, 1, 2)
    after.quantizer.load_state_dict(before.quantizer.state_dict())
    for seed in (3, 4):
        expected, got = whole.steps(seed), after.steps(seed)
        assert all(torch.equal(got[name], expected[name]) for name in NAMES)


@pytest.mark.parametrize("bits", [4, 16])
@pytest.mark.parametrize("then", ["flat", *PLACEMENTS])
def test_what_is_owed_arrives_wherever_the_ranks_go(then, bits, at, request):
    """From two hosts to `then`, and back; and then all that is owed is released."""
    before = None
    for stage, hosts in enumerate([BLOCKS, PLACEMENTS.get(then, BLOCKS), BLOCKS]):
        at(hosts)
        way = False if stage == 1 and then == "flat" else None
        run = Run(request.node.name, Schedule({0: bits, 1: 32}), hierarchical=way)
        if before is not None:
            run.follow(before)
        run.steps(2 * stage, 2 * stage + 1)
        before = run
    owed = {name: run.owed(name).norm() for name in NAMES}
    run.quantizer.controller.step({})
    run.steps(9)
    for name in NAMES:
        delivered, put_in, magnitude = run.sums(name)
        # What is owed outside a rank's new section is sent there with a gradient, and bfloat16 cannot hold their sum.
        rounded = 2**-8 * magnitude.norm() if bits <= 7 else 0
        assert rounded < owed[name]
        assert (put_in - delivered).norm() <= 3e-7 * magnitude.norm() + rounded, name


FAILURES = {
    "before it sends anything": (Hierarchical, "_scatter"),
    "before it has its host's sum": (Hierarchical, "_add"),
    "before its host's sum leaves": (kernels, "encode_into"),
}


@pytest.mark.parametrize("point", FAILURES)
@pytest.mark.parametrize(("hosts", "failing"), [(BLOCKS, 0), (BLOCKS, 3), (ROUND_ROBIN, 1)])
def test_a_rank_that_cannot_go_on_tells_the_others(hosts, failing, point, at, rank, request, monkeypatch):
    def out_of_memory(*arguments, **keywords):
        raise MemoryError("no room")

    at(hosts)
    run = Run(request.node.name, Static(4))
    run.steps(1)
    if rank == failing:
        monkeypatch.setattr(*FAILURES[point], out_of_memory)
    with pytest.raises(MemoryError if rank == failing else LockstepError, match="no room|gave up"):
        run.steps(2)
    assert torch.equal(hvd.allreduce(torch.ones(1), name="still alive"), torch.ones(1))


def test_a_nan_spoils_its_block_on_every_rank_and_no_residual(at, rank, request):
    """As in arithmetic.py; what each rank owes is its host's, of its section."""
    at(BLOCKS)
    run = Run(request.node.name, Static(4), names=["long"])
    run.steps(1)
    before = run.quantizer.state_dict()["residuals"]
    wanted = run.problem.draw(2)
    wanted["long"][512 * rank + 17] = float("nan")
    got = run.problem.reduce(wanted)["long"]
    after = run.quantizer.state_dict()["residuals"]
    assert torch.equal(got.isnan(), torch.arange(5000) < 4 * 512)
    assert run.quantizer.meter.total().nonfinite_blocks == 4
    [then], [now] = before.values(), after.values()
    spoiled = slice(512 * (rank // 2 * 2), 512 * (rank // 2 * 2 + 2))  # by this rank or its neighbour
    assert torch.equal(now[spoiled], then[spoiled])
    assert now.isfinite().all() and not torch.equal(now, then)
    assert run.problem.reduce(run.problem.draw(3))["long"].isfinite().all()
