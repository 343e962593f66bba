"""The deliberate breaks of `mutations.py` can be made: the source still has the text that they replace."""

from __future__ import annotations

import pytest

from .mutations import BREAKS, ROOT, Break, occurrences


@pytest.mark.parametrize("each", BREAKS, ids=lambda each: each.name.replace(" ", "_"))
def test_its_text_occurs_once_and_its_tests_exist(each: Break) -> None:
    assert occurrences(each) == 1, f"renew the text of the break {each.name!r} in tests/breaks.toml"
    assert each.new != each.old
    paths = [word for word in each.tests if word.startswith("tests/")]
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_names_are_unique_and_there_are_enough_of_them() -> None:
    assert len({each.name for each in BREAKS}) == len(BREAKS) >= 30
