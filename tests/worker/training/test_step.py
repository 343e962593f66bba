"""Rules that all kinds of training steps share."""

from __future__ import annotations

import math

import pytest
import torch

from gradwire.worker.training.step import all_finite

WHOLE = torch.linspace(-1.0, 1.0, 1000)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("index", [0, 499, 999])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_value_that_is_not_finite_is_found_wherever_it_is(
    dtype: torch.dtype, index: int, bad: float
) -> None:
    values = WHOLE.to(dtype, copy=True)
    assert all_finite([WHOLE, values])
    values[index] = bad
    assert not all_finite([WHOLE, values])
    assert not all_finite([values.to_sparse()])


def test_what_has_no_values_is_finite() -> None:
    assert all_finite([])
    assert all_finite([torch.empty(0), torch.zeros(3).to_sparse(), torch.full((2,), 3e38)])
