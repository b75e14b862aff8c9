"""`python -m hvd_dyncomp info`: every line has what is true here, also where something is missing."""

import os
import subprocess
import sys

import pytest
import torch

import hvd_dyncomp
from hvd_dyncomp import kernels
from hvd_dyncomp.__main__ import main
from hvd_dyncomp.exchange.wire import WIRE_VERSION
from hvd_dyncomp.kernels import portable


def lines(capsys) -> dict[str, str]:
    assert main(["info"]) == 0
    return {line.split("  ")[0]: line.partition("  ")[2].strip() for line in capsys.readouterr().out.splitlines()}


def test_it_names_what_is_there(capsys):
    said = lines(capsys)
    assert said["hvd_dyncomp"].startswith(f"{hvd_dyncomp.__version__}, wire format version {WIRE_VERSION}, ")
    assert said["torch"].startswith(f"{torch.__version__}; process groups: gloo")
    assert f"{len(os.sched_getaffinity(0))} cores" in said["machine"]
    assert said["launcher"] == "none: this process was started alone"
    assert said["kernels, CPU"].startswith(f"C++, {kernels.native.variants()[0]}")
    assert len(said) == 11 and all(said.values())


def test_it_says_why_nothing_faster_serves(capsys, monkeypatch):
    monkeypatch.setattr(kernels, "native", None)
    monkeypatch.setattr(kernels, "backends", {"cpu": portable})
    monkeypatch.setitem(kernels._why, "cpu", "no module of that name")
    assert lines(capsys)["kernels, CPU"] == ("the reference in torch operators, which is slow: no module of that name")


@pytest.mark.parametrize(("kind", "variants"), [("AVX2", ["baseline"]), ("AVX-512", ["avx2", "baseline"])])
def test_it_names_instruction_sets_that_the_processor_lacks(kind, variants, capsys, monkeypatch):
    monkeypatch.setattr(kernels.native, "variants", lambda: variants)
    said = lines(capsys)["kernels, CPU"]
    assert said.startswith(f"C++, {variants[0]}; this processor has no ") and f"no {kind}" in said


def test_a_launchers_rank_is_known_before_anything_connects_it(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    assert lines(capsys)["launcher"] == "rank 3; WORLD_SIZE=4"


def test_without_horovod_and_mpi_it_goes_on():
    code = "import sys\nsys.modules['horovod'] = None\nfrom hvd_dyncomp.__main__ import main\nmain(['info'])"
    clean = os.environ | {"PATH": os.path.dirname(sys.executable)}
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120, env=clean)
    assert done.returncode == 0 and "Horovod       cannot be imported: " in done.stdout, done.stderr
    assert "MPI           no mpirun on the path" in done.stdout
