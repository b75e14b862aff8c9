"""The list of faults cannot rot: each still applies to the package, and names tests that are there."""

import ast
from pathlib import Path

import mutate
import pytest

FAULTS = mutate.read_faults()


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_fault_applies_and_names_tests(fault):
    source = (mutate.installed_package() / fault.file).read_text()
    ast.parse(fault.applied(source))
    assert fault.tests, "it needs tests that notice it, or that come closest"
    for test in fault.tests:
        file, _, name = test.partition("::")
        if name:
            assert f"\ndef {name.partition('[')[0]}(" in (mutate.TESTS / file).read_text(), test
        else:
            assert (mutate.TESTS / file).is_file() or (mutate.BODIES / f"test_{file}.py").is_file(), test


def test_every_fault_is_another_one():
    assert len({(fault.file, fault.there, fault.instead) for fault in FAULTS}) == len(FAULTS)


def test_a_fault_that_does_not_apply_is_an_error():
    with pytest.raises(ValueError, match="found 0 times"):
        FAULTS[0].applied("another text")


def test_every_file_of_the_library_has_faults():
    """But for those that only name things or only call the native kernels."""
    package = mutate.installed_package()
    without = {"errors.py", "exchange/source.py", "kernels/native.py"}
    files = {str(path.relative_to(package)) for path in package.rglob("*.py")}
    expected = {name for name in files if Path(name).name != "__init__.py"} - without | {"kernels/__init__.py"}
    assert {fault.file for fault in FAULTS} == expected


def test_what_notices_faults_runs_without_any_as_well():
    noticed = ["test_levels.py::test_a[1, 2]", "lockstep: test_b", "lockstep: test_c", "test_levels.py::test_a[1, 2]"]
    nothing_to_run = ["no end after 900 s", "pytest ended with 2: 'E  SyntaxError'"]
    none, parts = mutate.without_a_fault(noticed + nothing_to_run, 3)
    assert none == [None] * 3 and parts == [["lockstep"], ["test_levels.py::test_a[1, 2]"], []]
