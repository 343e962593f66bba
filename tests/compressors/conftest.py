"""Fixtures that tests of kernels share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from gradwire.compressors import set_threads


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    set_threads(2)
    yield
    set_threads(len(os.sched_getaffinity(0)))
