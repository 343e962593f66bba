"""The exchanges that `gc-bench coded` compares: each has a mode and a scheme that exist."""

from __future__ import annotations

import pytest

from gradwire.benchmarks import coded
from gradwire.benchmarks.schemes import SCHEMES
from gradwire.server.job.modes.registry import parse


@pytest.mark.parametrize("name", coded.COMPETITORS)
def test_each_exchange_trains_with_a_mode_and_a_scheme_that_exist(name: str) -> None:
    mode, scheme = coded.COMPETITORS[name]
    parse(mode).check_workers(mode, 8)
    assert scheme in SCHEMES
