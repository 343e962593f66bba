"""The mutants of `mutations.py` can be made: the source still has the text that they replace."""

from __future__ import annotations

import pytest

from .mutations import MUTANTS, ROOT, Mutant, occurrences


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "_"))
def test_its_text_occurs_once_and_its_tests_exist(mutant: Mutant) -> None:
    assert occurrences(mutant) == 1, f"renew the text of the mutant {mutant.name!r} in tests/mutants.toml"
    assert mutant.new != mutant.old
    paths = [word for word in mutant.tests if word.startswith("tests/")]
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_there_are_enough_of_them() -> None:
    assert len(MUTANTS) >= 30
