"""The native kernels equal their specification bit for bit: every level, instruction set, rounding, kind of value."""

import shutil
import subprocess
import sys
import threading

import equality
import pytest
import torch
from equality import at_odd_address, each_level, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_dyncomp.kernels import block_bytes, decode_into, encode_into, native, reduce_into, reference

pytestmark = pytest.mark.promise("Native and GPU kernels give the results of the reference kernels, bit for bit.")

needs_native = pytest.mark.skipif(native is None, reason="the package was installed without a C++ compiler")
each_variant = pytest.mark.parametrize("variant", native.variants() if native else [])


@needs_native
@each_variant
@each_level
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_encode(variant, bits, data):
    with native.using(variant):
        equality.check_encode(data, bits)


@needs_native
@each_variant
@each_level
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_decode_and_reduce(variant, bits, data):
    with native.using(variant):
        equality.check_decode_and_reduce(data, bits)


@needs_native
@each_variant
@each_level
@pytest.mark.parametrize("block_size", [2048, 65536])
def test_large_blocks(variant, bits, block_size):
    with native.using(variant):
        equality.check_large_blocks(bits, block_size)


@needs_native
@each_variant
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("bits, block_size, versions", [(4, 512, 1), (0.5, 512, 2), (0.125, 64, 1), (0.25, 512, 3)])
def test_results_larger_than_the_caches(variant, shift, bits, block_size, versions):
    """Written past the caches where the address allows it; the last block is half a block short."""
    shape, count, size = {"bits": bits, "block_size": block_size}, 2**22 + block_size, block_bytes(bits, block_size)
    payloads = torch.randint(0, 256, (versions, count // block_size, size), dtype=torch.uint8)
    payloads[:, :, 3 if bits >= 1 else 1] = 0x3F  # scales about one
    values = at_odd_address(torch.zeros(count - block_size // 2), shift)
    with native.using(variant):
        decode_into([values], [version.view(-1) for version in payloads], **shape)
    expected = reference.decode_sum(list(payloads), **shape)
    assert same_bits(values, expected[: count - block_size // 2])


@needs_native
@each_variant
@each_level
def test_squares_beyond_float32(variant, bits):
    """What bounds a residual looks at squares in float32 first."""
    with native.using(variant):
        equality.check_squares_beyond_float32(bits)


@needs_native
@each_variant
@pytest.mark.parametrize("bits", [0.125, 0.5, 3])
def test_more_versions_than_fit_the_usual_place(variant, bits):
    with native.using(variant):
        equality.check_many_versions(bits)


@needs_native
@each_variant
@pytest.mark.parametrize("bits", [0.125, 0.5, 1, 4])
def test_few_real_values(variant, bits):
    with native.using(variant):
        equality.check_few_real_values(bits)


@needs_native
@each_variant
def test_ties_of_bfloat16(variant):
    with native.using(variant):
        equality.check_ties_of_bfloat16()


@needs_native
@each_variant
def test_sums_run_over_halves(variant):
    with native.using(variant):
        equality.check_sums_run_over_halves()


@needs_native
@each_variant
def test_a_bucket_of_very_many_tensors(variant):
    with native.using(variant):
        equality.check_a_bucket_of_very_many_tensors()


def test_versions_of_different_lengths_or_none_are_an_error():
    versions = [torch.zeros(258, dtype=torch.uint8), torch.zeros(516, dtype=torch.uint8)]
    for wrong in (versions, versions[::-1], []):
        with pytest.raises(ValueError, match="^versions must"):
            decode_into([torch.zeros(1024)], wrong, bits=4, block_size=512)
    with pytest.raises(ValueError, match="^out must"):
        reduce_into(versions[0], versions[1:], None, bits=4, block_size=512)


@needs_native
def test_an_unknown_instruction_set_is_an_error():
    with pytest.raises(ValueError, match="no variant 'abacus'"), native.using("abacus"):
        pass


@needs_native
def test_other_threads_run_meanwhile():
    """The kernels do not hold the interpreter: beside them another thread gets turns, on busy cores at some time."""
    gradient = torch.zeros(2**24)
    out = torch.empty(2**24 // 512 * block_bytes(4, 512), dtype=torch.uint8)
    turns, running = 0, True

    def work() -> None:
        nonlocal running
        for _ in range(50):
            if turns < 3:
                encode_into(out, [gradient], None, bits=4, block_size=512)
        running = False

    thread = threading.Thread(target=work)
    before = sys.getswitchinterval()
    sys.setswitchinterval(100)  # nobody takes the interpreter from a thread that does not hand it over
    try:
        thread.start()
        while running and thread.is_alive():
            turns += 1
            threading.Event().wait(1e-4)
    finally:
        sys.setswitchinterval(before)
    thread.join()
    assert turns >= 3


def test_where_there_is_a_compiler_the_native_kernels_are_built():
    if native is None and shutil.which("c++"):
        pytest.fail("installed with a compiler at hand, and yet without native kernels")


def test_without_the_extension_the_reference_serves_and_one_line_says_so():
    code = (
        "import sys; sys.modules['hvd_dyncomp.kernels._native'] = None\n"
        "import torch; from hvd_dyncomp.kernels import decode_into, encode_into, native, reduce_into\n"
        "assert native is None\n"
        "out, back = torch.empty(258, dtype=torch.uint8), torch.empty(512)\n"
        "encode_into(out, [torch.ones(512)], torch.zeros(512).bfloat16(), bits=4, block_size=512)\n"
        "decode_into([back], [out], bits=4, block_size=512)\n"
        "reduce_into(out, [out.clone(), out.clone()], None, bits=4, block_size=512)\n"
        "assert (back - 1).abs().max() < 0.5\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("native kernels are missing") == 1 and len(done.stderr.splitlines()) == 1, done.stderr
    # Where no tensor comes, as with `python -m hvd_dyncomp report`, nothing is missed.
    done = subprocess.run(
        [sys.executable, "-c", code.split("out, back")[0]], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_the_line_says_what_is_missing_and_what_helps():
    """`from ... import _native` would speak of a circular import; and pip keeps a build without the extension."""
    code = (
        "import sys, torch\n"
        "class Without:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'hvd_dyncomp.kernels._native':\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Without())\n"
        "from hvd_dyncomp.kernels import encode_into\n"
        "encode_into(torch.empty(258, dtype=torch.uint8), [torch.ones(512)], None, bits=4, block_size=512)\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "circular" not in done.stderr, done.stderr
    assert "No module named 'hvd_dyncomp.kernels._native'" in done.stderr and "--no-cache-dir" in done.stderr
