"""Which tests run in one process when pytest has several."""

from __future__ import annotations

import pytest

# Fixtures that take long to make: all tests that use one run where it has been made.
MADE_ONCE = ("built", "ran")


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for name in MADE_ONCE:
            if name in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.xdist_group(name))
