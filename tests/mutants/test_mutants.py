"""The list of faults cannot rot: each still applies, and names tests. And mutants are drawn as drawn.py says."""

import ast

import drawn
import mutate
import operators
import pytest
import reach

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


def test_what_notices_faults_runs_without_any_as_well():
    noticed = ["test_levels.py::test_a[1, 2]", "lockstep: test_b", "lockstep: test_c", "test_levels.py::test_a[1, 2]"]
    nothing_to_run = ["no end after 900 s", "pytest ended with 4: 'no collectors for a.py::b'"]
    none, parts = mutate.without_a_fault(noticed + nothing_to_run, 3)
    assert none == [None] * 3 and parts == [["lockstep"], ["test_levels.py::test_a[1, 2]"], []]


LIBRARY = '''
def sent(tensors: list[int], limit=2):
    """What goes out."""
    with lock:
        for tensor in tensors:
            if tensor > limit and tensor is not None:
                tensor.wait()
                logger.info("%s waits", tensor)
    try:
        return [one for one, _ in zip(tensors, tensors, strict=True) if one]
    except BaseException as error:
        raise Lost("what to do") from error
'''


@pytest.fixture
def package(tmp_path):
    (tmp_path / "sent.py").write_text(LIBRARY)
    return tmp_path


def test_mutants_are_what_a_tool_thinks_of_and_more(package):
    changes = {drawn.difference(LIBRARY, mutant.text()) for mutant in operators.mutants(package, "sent.py")}
    expected = {
        "- if tensor > limit and tensor is not None:  + if tensor >= limit and tensor is not None:",
        "- if tensor > limit and tensor is not None:  + if tensor > limit or tensor is not None:",
        "- if tensor > limit and tensor is not None:  + if False:",
        "- tensor.wait()  + pass",
        "- with lock:  + if True:",
        "- for tensor in tensors:  + for tensor in ():",
        "- return [one for one, _ in zip(tensors, tensors, strict=True) if one]  "
        "+ return [one for one, _ in zip(tensors, tensors, strict=True)]",
        "- except BaseException as error:  + except Exception as error:",
        '- raise Lost("what to do") from error  + pass',
    }
    assert expected <= changes
    silent = ("list[None", "What goes", "waits", "logger", "XX", "strict=None", "strict=False", "tensors, )")
    assert [change for change in changes if any(text in change for text in silent)] == []


def test_the_same_seed_draws_the_same_and_says_where(package):
    orders = [
        [(mutant.lines, mutant.text()) for mutant in drawn.drawn(package, ["sent.py"], seed)] for seed in (1, 1, 2)
    ]
    assert orders[0] == orders[1] != orders[2]
    lines = {drawn.difference(LIBRARY, text): where for where, text in orders[0]}
    assert lines["- tensor.wait()  + pass"] == (7, 7)


def test_quick_tests_of_a_line_come_first_and_slow_ones_not_at_all():
    seconds = {"a": 3.0, "b": 1.0, "c": 30.0, "d": 2.0}
    reached = reach.Reach({"sent.py": {1: [""], 7: ["a", "b", "c"], 8: ["d"]}}, seconds)
    assert reached.tests("sent.py", (7, 7), most=10) == ["b", "a"]
    assert reached.tests("sent.py", (7, 8), most=10) == ["b", "d", "a"]
    assert reached.tests("sent.py", (1, 1), most=100) == ["b", "d", "a", "c"]
    assert reached.tests("sent.py", (9, 9), most=10) == []
