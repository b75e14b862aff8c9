"""Which kernels serve which type of device."""

import types

import pytest
import torch

from hvd_dyncomp import kernels
from hvd_dyncomp.kernels import block_bytes, decode_into, encode_into, portable, reduce_into

FORMAT = {"bits": 4, "block_size": 512}
OUT = torch.zeros(block_bytes(4, 512), dtype=torch.uint8)
NAMES = ["encode_into", "decode_into", "reduce_into"]


def calls(out: torch.Tensor, values: torch.Tensor, residual: torch.Tensor, version: torch.Tensor):
    """Every operation, on these tensors."""
    yield lambda: encode_into(out, [values], residual, **FORMAT)
    yield lambda: decode_into([values], [out, version], **FORMAT)
    yield lambda: reduce_into(out, [version], residual, **FORMAT)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_registered_backend_serves_its_device_and_no_other(monkeypatch, device):
    served = []
    fake = types.SimpleNamespace(**{name: lambda *_, name=name: served.append(name) for name in NAMES})
    monkeypatch.setattr(kernels, "backends", {device: fake})
    for where in ("cpu", "meta"):
        tensors = [
            OUT.to(where),
            torch.zeros(512, device=where),
            torch.zeros(512, device=where).bfloat16(),
            OUT.clone().to(where),
        ]
        if where == device:
            for call in calls(*tensors):
                call()
    assert served == NAMES
    encode_into(OUT.clone(), [torch.zeros(512)], None, **FORMAT)
    assert served == NAMES + ["encode_into"] * (device == "cpu")


def test_every_backend_takes_the_same_arguments():
    import inspect

    for backend in kernels.backends.values():
        for name in NAMES:
            assert inspect.signature(getattr(backend, name)) == inspect.signature(getattr(portable, name))


@pytest.mark.parametrize("stray", range(4))
def test_tensors_on_different_devices_are_an_error(stray):
    tensors = [OUT, torch.zeros(512), torch.zeros(512).bfloat16(), OUT.clone()]
    used = [{0, 1, 2}, {0, 1, 3}, {0, 2, 3}]  # by the three operations
    tensors[stray] = tensors[stray].to("meta")
    for call, arguments in zip(calls(*tensors), used, strict=True):
        if stray in arguments:
            with pytest.raises(ValueError, match=r"^(values|residual|versions|out) must be on (cpu|meta) as the other"):
                call()


@pytest.mark.parametrize("real", [-1, 1.5, "x", True, 2**62])
def test_a_bad_number_of_real_values_is_named(real):
    with pytest.raises(ValueError, match="^real must be a whole number that is not negative, got"):
        reduce_into(OUT.clone(), [OUT], None, real=real, **FORMAT)
