"""What residuals do over several steps: they deliver what was lost, and never more than the gradients account for."""

import pytest
import torch
from equality import dither, residual_of
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_dyncomp import LEVELS
from hvd_dyncomp.kernels import block_bytes, encode_into, native, portable, reduce_into
from hvd_dyncomp.kernels.reference import decode, residual_bound

pytestmark = pytest.mark.promise("After any finite gradients, updates soon return to their usual quality.")

COMPRESSED = [bits for bits in LEVELS if bits < 32]
each_level = pytest.mark.parametrize("bits", COMPRESSED)
each_backend = pytest.mark.parametrize("backend", [portable, native] if native else [portable])
SEEDS = st.integers(0, 2**32 - 1)
B = 512


@pytest.fixture
def use(monkeypatch):
    """Has one backend serve the CPU."""
    return lambda backend: monkeypatch.setattr("hvd_dyncomp.kernels.backends", {"cpu": backend})


def gauss(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def encoded(values, residual, bits, block_size=B, blocks=None, **arguments) -> torch.Tensor:
    blocks = -(-len(values) // block_size) if blocks is None else blocks
    out = torch.empty(blocks * block_bytes(bits, block_size), dtype=torch.uint8)
    encode_into(out, [values], residual, bits=bits, block_size=block_size, **arguments)
    return out


def decoded(payload, bits, block_size=B) -> torch.Tensor:
    return decode(payload.view(-1, block_bytes(bits, block_size)), bits=bits, block_size=block_size)


class Worker:
    """One quantization with error feedback, or two as in the exchange of more than two workers."""

    def __init__(self, bits: int, quantizations: int, values: int) -> None:
        self.bits, self.residuals = bits, [residual_of(values) for _ in range(quantizations)]
        self.steps = 0

    def step(self, gradient: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        payload = encoded(gradient, self.residuals[0], self.bits, dither=dither(self.steps))
        if len(self.residuals) == 2:
            versions, payload = [payload], torch.empty_like(payload)
            reduce_into(payload, versions, self.residuals[1], bits=self.bits, block_size=B, dither=dither(-self.steps))
        return decoded(payload, self.bits)


@each_backend
@each_level
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_padding_never_matters(backend, bits, data):
    """Values that fill a block arrive, and are owed, bit for bit the same in a block twice or eight times as large.

    Below one bit, where the size of a block says which values are a group: values that are each alone in theirs.
    """
    small = data.draw(st.sampled_from([64, 128, 512] if bits >= 1 else [64, 512, 1024]))
    count = small if bits >= 1 else data.draw(st.integers(1, int(small * bits / 8)))
    values, owed = (
        gauss(count, data.draw(SEEDS)),
        gauss(count, data.draw(SEEDS)) * data.draw(st.sampled_from([0, 1, 30])),
    )
    block_size, extra = small * data.draw(st.sampled_from([2, 8])), data.draw(st.integers(0, 2))
    alone, padded = (torch.cat([owed, torch.zeros(n - count)]).bfloat16() for n in (small, (1 + extra) * block_size))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hvd_dyncomp.kernels.backends", {"cpu": backend})
        full = encoded(values, alone, bits, small)
        partial = encoded(values, padded, bits, block_size, 1 + extra)
        assert torch.equal(decoded(full, bits, small)[:count], decoded(partial, bits, block_size)[:count])
        assert torch.equal(alone[:count], padded[:count]) and not padded[count:].any()

        # What the versions decode to behind the real values is not zero at few bits: it must not count.
        reduced, reference = torch.empty_like(partial), torch.empty_like(full)
        reduce_into(reference, [full] * 2, alone, bits=bits, block_size=small, real=count)
        reduce_into(reduced, [partial] * 2, padded, bits=bits, block_size=block_size, real=count)
    assert torch.equal(decoded(reference, bits, small)[:count], decoded(reduced, bits, block_size)[:count])
    assert torch.equal(alone[:count], padded[:count]) and not padded[count:].any()


@each_backend
@each_level
@pytest.mark.parametrize("count", [3 * B, 2 * B + 100])
def test_a_block_of_zero_gradients_waits(use, backend, bits, count):
    """Nothing is delivered to frozen parameters, and what is owed to them arrives when they have a gradient again."""
    use(backend)
    values, residual = gauss(count, 1), torch.cat([gauss(count, 2), torch.zeros(3 * B - count)]).bfloat16()
    owed = residual.clone()
    values[:B] = -0.0
    values[2 * B :] = 0
    payload = encoded(values, residual, bits)
    assert not decoded(payload, bits).view(3, B)[[0, 2]].any()
    assert torch.equal(residual[:B], owed[:B]) and torch.equal(residual[2 * B :], owed[2 * B :])
    assert not torch.equal(residual[B : 2 * B], owed[B : 2 * B])

    residual = owed.clone()
    reduced = torch.empty_like(payload)
    reduce_into(reduced, [payload, payload], residual, bits=bits, block_size=B, real=count)
    assert not decoded(reduced, bits).view(3, B)[[0, 2]].any()
    assert torch.equal(residual[:B], owed[:B]) and torch.equal(residual[2 * B :], owed[2 * B :])
    assert not torch.equal(residual[B : 2 * B], owed[B : 2 * B])


@each_backend
@each_level
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_residual_is_bounded_by_the_last_gradient(backend, bits, data):
    """Whatever came before, equation 1a leaves at most (1 + c) norms of the gradient, block by block.

    Up to residuals of 10^35 gradients: what they are multiplied by is a float32, and coarse below 10^-38.
    """
    count = data.draw(st.integers(1, 2 * B))
    generator = torch.Generator().manual_seed(data.draw(SEEDS))
    power = data.draw(st.integers(-15, 15))
    values = torch.randn(count, generator=generator) * 10.0**power
    values[torch.rand(count, generator=generator) < data.draw(st.sampled_from([0.0, 0.5, 0.99]))] = 0
    residual = residual_of(2 * B)
    residual[:count] = torch.randn(count, generator=generator) * 10.0 ** data.draw(
        st.integers(-30, min(30, power + 35))
    )
    before = residual.clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hvd_dyncomp.kernels.backends", {"cpu": backend})
        out = encoded(values, residual, bits, blocks=2)
    rows = torch.cat([values, torch.zeros(2 * B - count)]).view(2, B)
    for gradient, old, new, got in zip(
        rows, before.view(2, B), residual.view(2, B), decoded(out, bits).view(2, B), strict=True
    ):
        most = (1 + residual_bound(bits)) * gradient.double().norm() * (1 + 2.0**-7)  # and its rounding
        assert torch.equal(new, old) if not gradient.any() else new.double().norm() <= most
        assert got.isfinite().all()


# Steps after which an update is as good as without the disturbance, within a quarter of its error: by level, with one
# quantization and with two. Measured were 11, 5 and 2 at 1, 2 and more bits, and 11, 12 and 2; at 1/2, 1/4 and 1/8 bit
# 7, 17 and 41, and 8, 21 and 46.
RECOVERY = {
    0.125: (60, 70),
    0.25: (28, 34),
    0.5: (12, 16),
    1: (5, 5),
    2: (10, 18),
    **dict.fromkeys((3, 4, 5, 6, 7, 8, 16), (3, 3)),
}


@each_level
@pytest.mark.parametrize("quantizations", [1, 2])
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_a_disturbance_is_over_soon(bits, quantizations, data):
    """One step of huge gradients, which the caller throws away, in all values, in some, or in one of each block."""
    seed, wait = data.draw(SEEDS) // 2, RECOVERY[bits][quantizations - 1]
    size = 10.0 ** data.draw(st.integers(1, 25))
    before, every = data.draw(st.integers(0, 5)), data.draw(st.sampled_from([1, 7, B]))
    disturbed, calm = Worker(bits, quantizations, 4 * B), Worker(bits, quantizations, 4 * B)
    usual = torch.tensor(0.0)
    for step in range(before + 1 + wait + 3):
        gradient = gauss(4 * B, seed + step)
        given = gradient.clone()
        if step == before:
            given[data.draw(st.integers(0, every - 1)) :: every] *= size
        errors = [(worker.step(g) - gradient).norm() for worker, g in ((disturbed, given), (calm, gradient))]
        # Grids of two quantizations that happen to match make an error smaller by a fifth.
        usual = torch.maximum(usual, errors[1])
        assert step <= before + wait or errors[0] <= 1.25 * usual, f"{step - before} steps later"
