"""The native kernels under the address and undefined-behaviour sanitizers: no byte outside of a buffer is touched."""

import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.promise("Native kernels access no byte outside their buffers.")

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "hvd_dyncomp" / "kernels" / "csrc"
VARIANTS = ["avx512.cpp", "avx2.cpp", "baseline.cpp"]
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
# Optimizing takes three times as long as all the rest.
FLAGS = ["-std=c++17", "-O0", "-ffp-contract=off", "-Wno-psabi", f"-I{CSRC}", *SANITIZE]


def compiler_complaint(directory: Path) -> str:
    """Why nothing can be built with the sanitizers here; empty if it can."""
    source = directory / "empty.cpp"
    source.write_text("int main() { return 0; }\n")
    try:
        done = subprocess.run(
            ["c++", *SANITIZE, source, "-o", directory / "empty"], capture_output=True, text=True, timeout=60
        )
    except FileNotFoundError:
        return "there is no c++"
    return "" if done.returncode == 0 else f"c++ cannot build with the sanitizers: {done.stderr.strip()[-200:]}"


@pytest.mark.thorough
@pytest.mark.timeout(900)  # a busy machine takes minutes to compile
def test_under_the_sanitizers(tmp_path):
    if complaint := compiler_complaint(tmp_path):
        pytest.skip(complaint)
    driver = tmp_path / "sanitized"
    sources = [ROOT / "tests" / "kernels" / "sanitized.cpp", *(CSRC / name for name in VARIANTS)]
    subprocess.run(["c++", *FLAGS, *sources, "-o", driver], check=True, timeout=600)
    done = subprocess.run([driver], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "comparisons" in done.stdout
