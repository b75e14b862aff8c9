"""docs/reliability.md says what is promised, and which tests keep it: both ways, and nothing of it is stale."""

import re

from promises import PAGE, kept, marked, promised, written

TEXT = PAGE.read_text(encoding="utf-8")


def test_the_page_is_what_the_marks_say():
    assert written(TEXT) == TEXT, "run: python tests/promises.py"


def test_every_promise_is_kept_and_every_mark_is_a_promise():
    rows = [promise for promises in promised(TEXT).values() for promise in promises]
    assert len(set(rows)) == len(rows) > 35
    assert set(rows) == set(kept()), "a row without a mark, or a mark without a row"


def test_every_group_has_its_heading():
    above = re.findall(r"^## (.+)\n\n<!-- table (.+): written by", TEXT, flags=re.MULTILINE)
    assert [group for group, _ in above] == [table for _, table in above] == list(promised(TEXT))
    assert len(above) == TEXT.count("| promise |")


def test_marks_of_files_and_of_tests_are_found():
    file = 'pytestmark = [pytest.mark.promise("a", "b"), pytest.mark.soak]'
    assert sorted(marked(f'{file}\n@pytest.mark.promise("c")\ndef test_it(): 0')) == ["a", "b", "c"]
    assert written(TEXT.replace("`kernels/test_native.py`", "`kernels/gone.py`")) == TEXT
