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
    assert bool(fault.tests) != bool(fault.survives), "it needs tests, or a reason why there are none"
    for test in fault.tests:
        assert (mutate.TESTS / test).is_file() or (mutate.BODIES / f"{test}.py").is_file(), test


def test_every_fault_is_another_one():
    assert len({(fault.file, fault.there, fault.instead) for fault in FAULTS}) == len(FAULTS)


def test_a_fault_that_does_not_apply_is_an_error():
    with pytest.raises(ValueError, match="found 0 times"):
        FAULTS[0].applied("another text")


def test_every_file_of_the_library_has_faults():
    """But for those that only name things, know only Horovod, or only call the native kernels."""
    package = mutate.installed_package()
    without = {"errors.py", "kernels/native.py", "transport/horovod.py"}
    files = {str(path.relative_to(package)) for path in package.rglob("*.py")}
    expected = {name for name in files if Path(name).name != "__init__.py"} - without | {"kernels/__init__.py"}
    assert {fault.file for fault in FAULTS} == expected
