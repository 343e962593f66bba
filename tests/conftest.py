"""Which tests run in one process when pytest has several."""

from __future__ import annotations

import pytest

# Fixtures that take long to make: all tests of a group run where they have been made.
GROUPS = {"built": "packages", "image": "packages", "ran": "one run"}


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        names: list[str] = getattr(item, "fixturenames", [])
        for group in {GROUPS[name] for name in names if name in GROUPS}:
            item.add_marker(pytest.mark.xdist_group(group))
