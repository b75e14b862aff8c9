"""An `Averager` on ranks of a `World`: what arrives, what waits, and what every rank hears if one is wrong."""

import copy
import re

import pytest
import torch
from simulated import WORLDS, SimulatedOptimizer, noise, places

from hvd_dyncomp import Averager, Controller, DynamicQuantizer, LockstepError, Schedule, Static, less_momentum
from hvd_dyncomp.diagnostics import relative_errors
from hvd_dyncomp.exchange.step import Step
from hvd_dyncomp.meter import allreduce_bytes
from hvd_dyncomp.simulate import World

SHAPES = {"conv": (8, 6, 3, 3), "matrix": (40, 33), "odd": (131,), "bias": (7,), "scalar": ()}
SHAPE = {"block_size": 64, "min_numel": 20, "bucket_bytes": 3000}
# Of the norm of a tensor's mean, in one step. Below one bit most of it waits.
BOUNDS = {0.25: 2.0, 1: 0.95, 4: 0.25, 16: 1e-3, 32: 1e-6}
LEVELS = pytest.mark.parametrize("bits", BOUNDS)
EVERYWHERE = places("2", "3", "2x2")
# By whoever has the turn; and Python 3.11 crashes if something is raised where a generator that is left behind ends.
SPARED = ("_work_in_background", "<genexpr>")


def parameters(shapes=SHAPES, dtype=torch.float32) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}


def averager(transport, bits=4, named=None, **arguments) -> Averager:
    return Averager((named or parameters()).items(), bits, transport=transport, **{**SHAPE, **arguments})


def drawn(name: str, shape: tuple[int, ...], rank: int, step: int) -> torch.Tensor:
    return noise(name, torch.Size(shape).numel(), rank, step).view(shape)


def gradients(rank: int, step: int, shapes=SHAPES) -> list[torch.Tensor]:
    return [drawn(name, shape, rank, step) for name, shape in shapes.items()]


def means(ranks: int, step: int, shapes=SHAPES) -> list[torch.Tensor]:
    everyone = [gradients(rank, step, shapes) for rank in range(ranks)]
    return [torch.stack([each.double() for each in one]).mean(0) for one in zip(*everyone, strict=True)]


def stepped(each: Averager, rank: int, step: int) -> list[torch.Tensor]:
    tensors = gradients(rank, step)
    each.mean_(tensors)
    return tensors


def equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, ours, theirs))


def same_on_all(seen: list[list[torch.Tensor]]) -> bool:
    return all(equal(seen[0], other) for other in seen)


def same_states(one, other) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_states(one[key], other[key]) for key in one)
    return one == other


@WORLDS
@LEVELS
def test_all_is_as_with_horovods_optimizer_bit_for_bit(ranks, hosts, bits):
    """Means, states and bytes, over several steps."""
    arguments = {**SHAPE, "skip": lambda name, _: name == "odd", "warmup_steps": 1}

    def ours(transport):
        each = averager(transport, bits, **arguments)
        return [stepped(each, transport.rank, step) for step in range(4)], each.state_dict(), each.meter.total()

    def theirs(transport):
        named = {name: torch.nn.Parameter(value) for name, value in parameters().items()}
        each = DynamicQuantizer(Controller(bits, transport=transport), transport=transport, **arguments)
        optimizer = SimulatedOptimizer(named, each, transport)
        each.attach(optimizer)
        seen = []
        for step in range(4):
            optimizer.zero_grad()
            for parameter, gradient in zip(named.values(), gradients(transport.rank, step), strict=True):
                optimizer.backward(parameter, gradient)
            optimizer.synchronize()
            seen.append([parameter.grad.clone() for parameter in named.values()])
            optimizer._synchronized = False
        return seen, each.state_dict(), each.meter.total()

    for one, other in zip(World(ranks, hosts=hosts).run(ours), World(ranks, hosts=hosts).run(theirs), strict=True):
        for step, (ours_, theirs_) in enumerate(zip(one[0], other[0], strict=True)):
            for name, mine, other_ in zip(SHAPES, ours_, theirs_, strict=True):
                if step and bits < 32 and name != "odd":
                    assert torch.equal(mine, other_), name
                else:  # uncompressed: here the simulation divides where the averager multiplies
                    torch.testing.assert_close(mine, other_)
        for key in ("residuals", "shard_residuals", "steps", "hosts"):
            assert same_states(one[1][key], other[1][key]), key
        for key in ("steps", *(key for key in vars(one[2]) if key.endswith("bytes"))):
            assert getattr(one[2], key) == getattr(other[2], key), key


@EVERYWHERE
@pytest.mark.parametrize("bits", [4, 32])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_than_the_parameters(ranks, hosts, bits, dtype):
    def program(transport):
        tensors = [tensor.to(dtype) for tensor in gradients(transport.rank, 0)]
        averager(transport, bits).mean_(tensors)
        return tensors

    seen = World(ranks, hosts=hosts).run(program)
    assert same_on_all(seen) and {tensor.dtype for tensor in seen[0]} == {dtype}
    precision = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float64: 1e-15}[dtype]
    rounded = [[tensor.to(dtype).double() for tensor in gradients(rank, 0)] for rank in range(ranks)]
    for got, *each in zip(seen[0], *rounded, strict=True):
        mean = torch.stack(each).mean(0)
        assert (got - mean).norm() <= (BOUNDS[4] if bits == 4 else precision) * mean.norm() + 0.1 * (bits == 4)


@EVERYWHERE
@pytest.mark.parametrize("bits", [4, 32])
def test_any_strides(ranks, hosts, bits):
    """The same means as in contiguous tensors, and nothing else of their memory is written."""

    def program(transport, strided: bool):
        tensors, whole = gradients(transport.rank, 0), []
        if strided:
            tensors[0] = tensors[0].to(memory_format=torch.channels_last)
            tensors[1] = tensors[1].t().contiguous().t()
            whole = [torch.full((3 * 131,), 7.0)]
            tensors[2] = whole[0][1::3].copy_(tensors[2])
        averager(transport, bits).mean_(tensors)
        assert not strided or ((whole[0][0::3] == 7).all() and (whole[0][2::3] == 7).all())
        return tensors

    for strided, plain in zip(
        World(ranks, hosts=hosts).run(lambda transport: program(transport, True)),
        World(ranks, hosts=hosts).run(lambda transport: program(transport, False)),
        strict=True,
    ):
        assert equal(strided, plain)


@EVERYWHERE
@pytest.mark.parametrize("bits", [4, 32])
def test_complex_and_integer_parameters(ranks, hosts, bits):
    """Complex tensors travel as they are; for what is counted in integers, floating values may be averaged."""

    def program(transport):
        # At 32 bits all are in one sum, where the complex ones begin at an odd place.
        named = {"scale": torch.zeros(()), "phase": torch.zeros(600, dtype=torch.complex64)}
        named["counts"] = torch.zeros(700, dtype=torch.int64)
        each = averager(transport, bits, named=named, skip=lambda name, parameter: name == "scale")
        phase = torch.complex(noise("re", 600, transport.rank, 0), noise("im", 600, transport.rank, 0))
        tensors = [torch.tensor(float(transport.rank)), phase, noise("counts", 700, transport.rank, 0)]
        each.mean_(tensors)
        assert each.meter.total().float32_bytes == allreduce_bytes(4 * (1 + 2 * 600 + 700), ranks)
        return tensors

    seen = World(ranks, hosts=hosts).run(program)
    assert same_on_all(seen)
    real, imaginary, counts = (
        torch.stack([noise(name, size, rank, 0) for rank in range(ranks)]).mean(0)
        for name, size in (("re", 600), ("im", 600), ("counts", 700))
    )
    torch.testing.assert_close(seen[0][0], torch.tensor((ranks - 1) / 2))
    torch.testing.assert_close(seen[0][1], torch.complex(real, imaginary))
    assert (seen[0][2] - counts).norm() <= BOUNDS[bits] * counts.norm()


def test_what_is_skipped_travels_as_it_is():
    def program(transport):
        each = averager(transport, 1, skip=lambda name, parameter: parameter.dim() == 2)
        return stepped(each, transport.rank, 0)[1], each.meter.total().sent_bytes

    mean = means(2, 0)[1]
    [(one, sent), (other, _)] = World(2).run(program)
    assert torch.equal(one, other) and (one - mean).norm() <= 1e-6 * mean.norm()
    as_floats, everything = (allreduce_bytes(4 * values, 2) for values in (40 * 33, 1 + 2 * 600 + 700))
    assert as_floats < sent < 0.9 * everything


@pytest.mark.promise("Means of finite float16 gradients are finite; below 32 bits, sums of them are refused.")
@pytest.mark.parametrize("ranks", [*range(2, 9), 13, 21])
def test_plain_means_of_finite_float16_values_are_finite(ranks):
    """And those of infinite ones are infinite: a `GradScaler` relies on it. Thirds of 65,504 would sum to infinity."""

    def program(transport):
        half = {"a": torch.zeros(4, dtype=torch.float16)}
        each = averager(transport, 32, named=half)
        tensor = torch.tensor([65_504, -65_504, 1, 65_504], dtype=torch.float16)
        if transport.rank == 0:
            tensor[3] = float("inf")
        each.mean_([tensor])
        return tensor

    for got in World(ranks).run(program):
        assert got[:3].isfinite().all() and got[3] == float("inf") and got[2].item() == pytest.approx(1, rel=0.01)
        assert (got[:2].abs() >= 65_000).all()


@LEVELS
def test_one_rank_changes_nothing_and_sends_nothing(bits):
    def program(transport):
        each = averager(transport, bits)
        return stepped(each, 0, 0), each.meter.total()

    [(tensors, sent)] = World(1).run(program)
    assert equal(tensors, gradients(0, 0))
    assert sent.steps == 1 and not sent.sent_bytes


@EVERYWHERE
def test_none_on_all_ranks_keeps_what_waits(ranks, hosts):
    """Also in blocks that it shares with others. Nothing of the others changes."""

    def program(transport):
        each = averager(transport, Controller(Schedule({0: 4, 2: 32}), transport=transport))
        first = stepped(each, transport.rank, 0)[2]
        each.controller.step({})
        before = copy.deepcopy(each.state_dict()["residuals"]["odd"])
        tensors = gradients(transport.rank, 1)
        each.mean_([*tensors[:2], None, *tensors[3:]])
        assert before.any() and torch.equal(each.state_dict()["residuals"]["odd"], before)
        each.controller.step({})
        return tensors[:2], first, stepped(each, transport.rank, 2)[2]

    seen = World(ranks, hosts=hosts).run(program)
    assert same_on_all([tensors for tensors, _, _ in seen])
    for got, mean in zip(seen[0][0], means(ranks, 1), strict=False):
        assert (got - mean).norm() <= 2 * BOUNDS[4] * mean.norm()
    _, first, last = seen[0]
    expected = means(ranks, 0)[2] + means(ranks, 2)[2]
    assert (first + last - expected).norm() <= 2e-3 * expected.norm() < (first - means(ranks, 0)[2]).norm()


@EVERYWHERE
@pytest.mark.parametrize("bits", [4, 32])
def test_none_on_some_ranks_is_an_error_in_words_on_all(ranks, hosts, bits):
    def program(transport):
        each = averager(transport, bits)
        stepped(each, transport.rank, 0)
        tensors = gradients(transport.rank, 1)
        given = [None if transport.rank == 1 and i == 2 else tensor for i, tensor in enumerate(tensors)]
        with pytest.raises(LockstepError) as error:
            each.mean_(given)
        assert equal(tensors, gradients(transport.rank, 1))
        with pytest.raises(RuntimeError, match="step 1 was interrupted by LockstepError"):
            each.mean_(tensors)
        return str(error.value)

    assert set(World(ranks, hosts=hosts).run(program)) == {
        "the ranks' quantizers differ: rank 0 has tensors that are None [], rank 1 has ['odd'] "
        "(give zeros where only some ranks have a tensor)"
    }


@EVERYWHERE
@pytest.mark.parametrize("bits", [4, 32])
def test_other_dtypes_on_some_ranks_are_an_error_on_all(ranks, hosts, bits):
    """Sums of what travels uncompressed would read the one as the other."""

    def program(transport):
        dtype = torch.bfloat16 if transport.rank == 1 else torch.float16
        tensors = [tensor.to(dtype) for tensor in gradients(transport.rank, 0)]
        with pytest.raises(LockstepError) as error:
            averager(transport, bits).mean_(tensors)
        assert equal(tensors, [tensor.to(dtype) for tensor in gradients(transport.rank, 0)])
        return str(error.value)

    (text,) = set(World(ranks, hosts=hosts).run(program))
    assert "rank 0 has dtypes {'conv': 'torch.float16'" in text and "rank 1 has {'conv': 'torch.bfloat16'" in text


@EVERYWHERE
@pytest.mark.parametrize("bits", [4, 32])
def test_parameters_of_other_dtypes_on_some_ranks_are_an_error_on_all(ranks, hosts, bits):
    def program(transport):
        weight = torch.ones(2000, dtype=torch.bfloat16 if transport.rank == 1 else torch.float16)
        with pytest.raises(LockstepError) as error:
            Averager([("weight", weight)], bits, transport=transport)
        return str(error.value)

    (text,) = set(World(ranks, hosts=hosts).run(program))
    other = "weight (torch.bfloat16, shape [2000]) on rank 1"
    assert f"is weight (torch.float16, shape [2000]) on rank 0, but {other}" in text


WRONG = {
    "too few": (lambda tensors: tensors[:-1], TypeError, "tensors must be a sequence of 5 .* got 4 of them"),
    "no sequence": (lambda tensors: iter(tensors), TypeError, "tensors must be a sequence of 5 .* got <list_iterator"),
    "no tensor": (lambda tensors: [*tensors[:-1], 0.5], TypeError, r"tensors\[4\] \(scalar\) must be .*, got 0.5"),
    "sparse": (
        lambda tensors: [tensors[0], tensors[1].to_sparse(), *tensors[2:]],
        TypeError,
        r"tensors\[1\] \(matrix\) must be a dense tensor or None, got tensor\(",
    ),
    "shape": (
        lambda tensors: [tensors[0], tensors[1].t(), *tensors[2:]],
        ValueError,
        r"tensors\[1\] \(matrix\) must have shape \(40, 33\) and be on cpu, got shape \(33, 40\) on cpu",
    ),
    "device": (
        lambda tensors: [tensors[0], tensors[1].to("meta"), *tensors[2:]],
        ValueError,
        r"tensors\[1\] \(matrix\) must have .* be on cpu, got shape \(40, 33\) on meta",
    ),
    "integer": (
        lambda tensors: [*tensors[:2], tensors[2].int(), *tensors[3:]],
        ValueError,
        r"tensors\[2\] \(odd\) must have a floating dtype, got torch.int32",
    ),
    "complex": (
        lambda tensors: [*tensors[:2], tensors[2].cfloat(), *tensors[3:]],
        ValueError,
        r"tensors\[2\] \(odd\) must have a floating dtype, got torch.complex64",
    ),
    "expanded": (
        lambda tensors: [*tensors[:2], torch.ones(()).expand(131), *tensors[3:]],
        ValueError,
        r"tensors\[2\] \(odd\) must have memory for each value, got strides \(0,\)",
    ),
    "shared": (
        lambda tensors: [tensors[0], tensors[1], tensors[1].view(-1)[9:140], *tensors[3:]],
        ValueError,
        "tensors must not share memory, .* but that of odd is in another one's",
    ),
}


@places("2", "3")
@pytest.mark.parametrize("bits", [4, 32])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_rank_whose_tensors_do_not_fit_says_so_to_all(ranks, hosts, bits, wrong):
    """Nothing is averaged on any rank, then and later."""
    spoil, kind, pattern = WRONG[wrong]

    def program(transport):
        each = averager(transport, bits)
        stepped(each, transport.rank, 0)
        tensors = gradients(transport.rank, 1)
        wrong_here = transport.rank == 1
        with pytest.raises(kind if wrong_here else LockstepError) as error:
            each.mean_(spoil(tensors) if wrong_here else tensors)
        assert equal(tensors, gradients(transport.rank, 1))
        with pytest.raises(RuntimeError, match="interrupted by " + error.type.__name__):
            each.mean_(tensors)
        assert equal(tensors, gradients(transport.rank, 1))
        return str(error.value)

    seen = World(ranks, hosts=hosts).run(program)
    assert re.match(pattern, seen[1]), seen[1]
    for rank in {*range(ranks)} - {1}:
        assert seen[rank] == f"rank 1 cannot use its quantizer: {seen[1]}"


@pytest.mark.promise("DDP: nothing uncompressed is sent before all ranks agree.")
@places("2", "3")
def test_ranks_at_other_levels_start_no_sum(ranks, hosts):
    """What each would send does not fit the others' sum, and ends a process whose sums are Gloo's."""

    def program(transport):
        bits = 4 if transport.rank == 0 else 32
        each = averager(transport, bits, skip=lambda name, parameter: parameter.numel() < 500)
        with pytest.raises(LockstepError, match="rank 0 has bits 4, rank 1 has 32"):
            each.mean_(gradients(transport.rank, 0))

    World(ranks, hosts=hosts).run(program)


def test_what_is_done_in_the_background_makes_no_graph(monkeypatch):
    """In a thread, where `mean_` has not switched that off."""
    advance, seen = Step._poll, []

    def watched(self):
        seen.append(torch.is_grad_enabled())
        return advance(self)

    def program(transport):
        each = averager(transport)
        step = each._begin()
        with torch.enable_grad():
            step._in_background()
        each._fail(RuntimeError())

    monkeypatch.setattr(Step, "_poll", watched)
    World(2).run(program)
    assert seen and not any(seen)


@pytest.mark.parametrize("bits", [4, 32])
def test_a_tensor_without_memory_of_its_own_for_signs_is_read_as_it_is(bits):
    """Views of a conjugate have their signs in a flag."""

    def program(transport, lazily: bool):
        named = {"phase": torch.zeros(600, dtype=torch.complex64), "part": torch.zeros(600)}
        values = torch.complex(noise("re", 600, transport.rank, 0), noise("im", 600, transport.rank, 0))
        conjugate = values.conj() if lazily else values.conj().resolve_conj()
        tensors = [conjugate, torch.view_as_real(values)[:, 1].neg()]
        if lazily:
            tensors[1] = values.clone().conj().imag
            assert tensors[1].is_neg() and tensors[0].is_conj()
        averager(transport, bits, named=named).mean_(tensors)
        return [tensor.clone() for tensor in tensors]

    for lazy, plain in zip(
        World(2).run(lambda transport: program(transport, True)),
        World(2).run(lambda transport: program(transport, False)),
        strict=True,
    ):
        assert equal(lazy, plain)


@EVERYWHERE
@pytest.mark.parametrize("where", ["all", "one"])
def test_inference_mode_is_refused_in_words(ranks, hosts, where):
    def program(transport):
        each = averager(transport)
        tensors = gradients(transport.rank, 0)
        here = where == "all" or transport.rank == 0
        with torch.inference_mode(here), pytest.raises(RuntimeError, match="in inference mode, because"):
            each.mean_(tensors)
        assert equal(tensors, gradients(transport.rank, 0))
        with pytest.raises(RuntimeError, match="interrupted by"):
            each.mean_(tensors)
        return stepped(averager(transport), transport.rank, 0)

    assert same_on_all(World(ranks, hosts=hosts).run(program))


def test_tensors_made_in_inference_mode_are_refused():
    def program(transport):
        each = averager(transport)
        with torch.inference_mode():
            tensors = gradients(transport.rank, 0)
        with pytest.raises(ValueError, match=r"tensors\[0\] \(conv\) must not be made in inference mode"):
            each.mean_(tensors)

    World(2).run(program)


@EVERYWHERE
def test_levels_follow_a_controller_that_several_averagers_share(ranks, hosts):
    def program(transport):
        controller = Controller(Schedule({0: 4, 1: 16, 2: 32}), transport=transport)
        pair = [averager(transport, controller) for _ in range(2)]
        seen = []
        for epoch, bits in enumerate((4, 16, 32)):
            announced = min(bits, 16)  # the first step after a rise to 32 bits delivers what waits, at 16
            assert controller.epoch == epoch and [each.bits for each in pair] == [announced, announced]
            for each in pair:
                got = stepped(each, transport.rank, epoch)
                mean = means(ranks, epoch)[0]
                bound = BOUNDS[bits] * mean.norm() + (each.bits != 4) * 0.2 * mean.norm()  # what waited arrives
                assert (got[0] - mean).norm() <= bound
                seen += got
            controller.step({"loss": 1.0})
        assert pair[0].meter.level(16).steps == 2 and pair[1].meter.epoch(1).steps == 1
        return seen

    assert same_on_all(World(ranks, hosts=hosts).run(program))


@pytest.mark.promise("Below 8 bits, `Averager` refuses to average parameters themselves.")
@pytest.mark.parametrize("bits", [0.25, 4, 8, 32])
def test_parameters_themselves_are_refused_where_a_mean_would_be_far_from_them(bits):
    """Error feedback delivers in a sum what a mean lacks, and a mean that replaces a parameter is in no sum."""

    def program(transport):
        named = {name: torch.nn.Parameter(value) for name, value in parameters().items()}
        each = averager(transport, bits, named=named)
        given = [named["conv"].detach().view(8, 6, 3, 3), *gradients(transport.rank, 0)[1:]]
        with torch.no_grad():
            named["conv"].copy_(gradients(transport.rank, 0)[0])
        before = [tensor.clone() for tensor in given]
        if bits >= 8:
            each.mean_(given)
            return given
        with pytest.raises(
            ValueError, match=r"must not be the parameters themselves, as conv is, .* change = parameter"
        ):
            each.mean_(given)
        assert equal(given, before)
        return stepped(averager(transport, bits), transport.rank, 1)

    assert same_on_all(World(2).run(program))


@pytest.mark.parametrize(("bits", "least", "most"), [(4, 0, 0.001), (2, 0, 0.01), (0.25, 0.05, 0.5)])
def test_how_much_of_changes_that_keep_their_direction_never_arrives(bits, least, most):
    """As those of local steps: of their sum, what is neither delivered nor waits. The residual's bound cuts it."""
    shapes = {"matrix": (64, 64)}

    def program(transport):
        each = averager(transport, bits, named=parameters(shapes))
        changed = delivered = torch.zeros(64, 64, dtype=torch.float64)
        for step in range(50):
            change = drawn("direction", (64, 64), 0, 0) + 0.3 * drawn("matrix", (64, 64), transport.rank, step)
            changed = changed + change
            each.mean_([change])
            delivered = delivered + change
        return changed, delivered, each.state_dict()["residuals"]["matrix"].double()

    (one, delivered, waits), (other, _, waits_there) = World(2).run(program)
    total = (one + other) / 2
    lost = (total - delivered - (waits + waits_there) / 2).norm() / total.norm()
    assert least <= lost <= most


def test_without_a_level_it_has_4_bits():
    each = Averager(parameters().items(), transport=World(1).transports[0])
    assert each.controller.policy.config() == Static(4).config()
    assert each.controller.step({}) == 4


@EVERYWHERE
def test_residuals_that_are_dropped(ranks, hosts):
    def program(transport):
        each = averager(transport)
        fresh = stepped(each, transport.rank, 0)
        stepped(each, transport.rank, 1)
        assert any(values.any() for values in each.state_dict()["residuals"].values())
        each.drop_residuals()
        assert not any(values.any() for values in each.state_dict()["residuals"].values())
        assert equal(stepped(each, transport.rank, 0), fresh)

    World(ranks, hosts=hosts).run(program)


def test_errors_are_relative_to_the_means_that_are_given():
    def program(transport):
        each = averager(transport, min_numel=1)
        got = stepped(each, transport.rank, 0)
        errors = relative_errors(each, dict(zip(SHAPES, got, strict=True)))
        assert set(errors) == set(SHAPES)
        for name, mean, one in zip(SHAPES, means(2, 0), got, strict=True):
            if mean.numel() > 100:
                assert errors[name] == pytest.approx(float((one - mean).norm() / one.norm()), rel=0.2)
        return relative_errors(each, {})

    assert World(2).run(program) == [{}, {}]


@places("2", "3")
def test_parameters_are_compared_on_request_only(ranks, hosts):
    """Between local steps they differ rightly."""

    def program(transport):
        controller = Controller(4, transport=transport)
        models = [parameters() for _ in range(2)]
        pair = [averager(transport, controller, named=named) for named in models]
        controller.step({})
        for each in pair:
            stepped(each, transport.rank, 0)
            each.load_state_dict(each.state_dict())
        controller.step({})
        if transport.rank == 1:
            models[1]["odd"][3] = 1
        stepped(pair[1], transport.rank, 1)
        pair[0].check_replicas()
        with pytest.raises(LockstepError, match="parameter odd is not the same on rank 0 and rank 1"):
            pair[1].check_replicas()

    World(ranks, hosts=hosts).run(program)


@pytest.mark.parametrize("left_out", [False, True])
def test_the_optimizer_steps_less_momentum_at_few_bits(left_out, caplog):
    """Nobody names it: it is known by its parameters."""

    def program(transport):
        parameter = torch.nn.Parameter(torch.zeros(300))
        optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=0.9)
        optimizer = less_momentum(optimizer) if left_out else optimizer
        each = averager(transport, 0.25, named={"a": parameter})
        moved = []
        for step in range(3):
            parameter.grad = noise("a", 300, transport.rank, step)
            each.mean_([parameter.grad])
            before = parameter.detach().clone()
            optimizer.step()
            moved.append(float((before - parameter.detach() - parameter.grad).norm() / parameter.grad.norm()))
        return moved

    for moved in World(2).run(program):
        if left_out:  # the rate is as large as a momentum would make it
            assert moved == pytest.approx([9.0] * 3, rel=1e-4)
        else:
            assert moved[0] < 1e-4 < moved[1]
    assert ("momentum" in caplog.text) == (not left_out)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"block_sise": 64}, "Averager takes no argument block_sise"),
        ({"named_parameters": [("a", torch.zeros(3)), ("a", torch.zeros(3))]}, "named_parameters must have unique"),
    ],
)
def test_arguments_that_are_refused(arguments, text):
    [transport] = World(1).transports
    with pytest.raises((TypeError, ValueError), match=text):
        Averager(**{"named_parameters": parameters().items(), "transport": transport, **arguments})
