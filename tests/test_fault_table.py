"""docs/reference/faults.md has the 25 rows, and names tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "reference" / "faults.md").read_text()


def test_every_row_is_there_and_says_what_shows_it() -> None:
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \| ([^|]*) \| ([^|]+) \|$", PAGE, re.M)
    assert [int(number) for number, *_ in rows] == list(range(1, 26))
    for number, fault, holds, shown in rows:
        assert fault.strip(), number
        assert "`test_" in shown or "*not yet" in shown, number
        assert holds.strip() or "*not yet" in shown, number


def test_the_tests_that_it_names_exist() -> None:
    defined = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^\s*(?:async )?def (test_\w+)\(", path.read_text(), re.M)
    }
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert named
    assert named - defined == set()


def test_what_it_calls_slow_is_marked_so() -> None:
    """And nothing else is: `make test` leaves it out."""
    marked = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"@pytest\.mark\.slow\n(?:@[^\n]*\n)*def (test_\w+)\(", path.read_text())
    }
    called = set(re.findall(r"`(test_\w+)` \*slow\*", PAGE))
    assert called <= marked
