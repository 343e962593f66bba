"""Gradient coding: from any pushes that are enough the sum over all parts comes out."""

from __future__ import annotations

import random
from itertools import combinations
from math import comb

import numpy as np
import pytest

from gradwire.proto.straggler_code import StragglerCode, parts_of, straggler_code

SMALL = [(n, s) for n in range(1, 9) for s in range(n)]
LARGE = [(n, s) for n in range(9, 17) for s in range(1, 5)]


def present_sets(members: int, size: int) -> list[tuple[int, ...]]:
    if comb(members, size) <= 300:
        return list(combinations(range(members), size))
    chance = random.Random(members * 100 + size)
    return [tuple(sorted(chance.sample(range(members), size))) for _ in range(300)]


def decoded(code: StragglerCode, present: tuple[int, ...]) -> np.ndarray:
    """Return the weight of each part's sum in the decoded gradient."""
    weights = np.array(code.decoding_weights(present))
    return np.asarray(weights @ code.matrix[list(present)])


@pytest.mark.parametrize(("members", "stragglers"), SMALL + LARGE)
def test_any_that_are_enough_come_to_the_sum(members: int, stragglers: int) -> None:
    code = straggler_code(members, stragglers)
    for size in {members - stragglers, members}:
        for present in present_sets(members, size):
            np.testing.assert_allclose(decoded(code, present), 1.0, atol=1e-11)


@pytest.mark.parametrize(("members", "stragglers"), SMALL + LARGE)
def test_in_float32_the_error_stays_small(members: int, stragglers: int) -> None:
    """The rounding error of a push is multiplied with its weight, which is largest where 4 of 16 may be
    missing."""
    code = straggler_code(members, stragglers)
    generator = np.random.default_rng(members)
    sums = generator.standard_normal((members, 50))
    pushes = (code.matrix @ sums).astype(np.float32)
    for present in present_sets(members, members - stragglers)[:60]:
        weights = code.decoding_weights(present)
        assert max(map(abs, weights)) < 260
        out = np.zeros(50, np.float32)
        for member, weight in zip(present, weights, strict=True):
            out += np.float32(weight) * pushes[member]
        np.testing.assert_allclose(out, sums.sum(axis=0), atol=1e-3 if members > 8 else 1e-4)


@pytest.mark.parametrize(("members", "stragglers"), SMALL + LARGE)
def test_a_member_computes_its_parts_and_pushes_something_of_their_size(
    members: int, stragglers: int
) -> None:
    code = straggler_code(members, stragglers)
    for member in range(members):
        parts = parts_of(member, members, stragglers)
        assert len(set(parts)) == stragglers + 1
        elsewhere = np.delete(code.matrix[member], parts)
        assert not elsewhere.any()
        assert np.abs(code.coefficients(member)).mean() == pytest.approx(1.0)
        assert np.abs(code.coefficients(member)).max() < 4


def test_where_the_parts_divide_into_groups_all_weights_are_plain() -> None:
    code = straggler_code(6, 2)
    assert set(code.matrix.flat) == {0.0, 1.0}
    assert code.decoding_weights([0, 1, 3, 4]) == pytest.approx([0.5, 0.5, 0.5, 0.5])
    assert code.decoding_weights([0, 1, 2, 3]) == pytest.approx([1.0, 0.0, 0.0, 1.0])


def test_too_few_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 3 of 4 members, got 2"):
        straggler_code(4, 1).decoding_weights([0, 2])


@pytest.mark.parametrize(("members", "stragglers"), [(3, 3), (1, 1), (4, -1)])
def test_some_have_to_be_left(members: int, stragglers: int) -> None:
    with pytest.raises(ValueError, match="stragglers: expected 0 to"):
        straggler_code(members, stragglers)
