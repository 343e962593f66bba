"""The command that measures the house counts what its page says."""

from __future__ import annotations

import sys

import pytest

from . import house

TEXT = '''"""A module.

With two lines of text.
"""

import os  # not a line of text


class First:
    # a comment
    def add(self) -> None:
        """Add."""

    @property
    def size(self) -> int:
        return 1


class Second(First):
    def add(self) -> None: ...


class Third:
    def add(self) -> None: ...
    def _take(self) -> None: ...
'''


def test_code_and_text_are_counted_apart() -> None:
    file = house.source("x.py", TEXT)
    assert (file.code, file.text, file.lines) == (11, 5, 25)


def test_classes_that_inherit_give_one_body() -> None:
    assert house.bodies([house.source("x.py", TEXT)]) == {"add": {"First", "Third"}}


def test_a_file_belongs_to_the_innermost_room() -> None:
    assert house.room_of("server/job/core.py", ["server", "server/job", "."]) == "server/job"
    assert house.room_of("settings.py", ["server", "."]) == "."


def test_a_room_over_its_budget_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [house.Figure("code", 10, 9, "a"), house.Figure("code", 9, 9, "b")]

    def figures(_budget: object) -> list[house.Figure]:
        return rows

    monkeypatch.setattr(house, "figures", figures)
    monkeypatch.setattr(sys, "argv", ["house.py", "--check"])
    assert house.main() == 1
    rows.pop(0)
    assert house.main() == 0
