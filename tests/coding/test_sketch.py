"""Sketches tell rounding from other gradients."""

from __future__ import annotations

import math

import numpy as np

from gradwire.coding import sketch, to_fixed_point


def words_of(values: np.ndarray) -> np.ndarray:
    out = np.zeros(values.size, np.uint32)
    to_fixed_point(values, out)
    return out


def test_a_sketch_tells_rounding_from_another_gradient() -> None:
    chance = np.random.default_rng(3)
    gradient = chance.normal(size=100_000).astype(np.float32) * 0.05
    norm, product = sketch(words_of(gradient))
    rounded = sketch(words_of(gradient * np.float32(1 + 1e-6)))
    assert max(abs(rounded[0] - norm), abs(rounded[1] - product)) < 1e-4 * norm
    other = chance.normal(size=100_000).astype(np.float32) * 0.05
    apart = sketch(words_of(other))
    assert max(abs(apart[0] - norm), abs(apart[1] - product)) > 1e-2 * norm
    assert sketch(words_of(np.zeros(5, np.float32))) == (0.0, 0.0)
    assert math.isfinite(product)
