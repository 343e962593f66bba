"""Slices and codes at the server: sums, divisions, options that go together."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from pushes import Share, apply, cut_plan, dense, pushed

from gradwire.common.configuration import UsageError
from gradwire.common.spec import SpecError
from gradwire.optim.optimizer import Optimizer, parse_optimizer
from gradwire.proto.manifest import Manifest
from gradwire.proto.messages import Tensor
from gradwire.server.checks import check
from gradwire.server.job.modes.division import Sharing, Sliced, StragglerCoded, divide, largest_divisor
from gradwire.server.job.modes.registry import parse
from gradwire.server.job.samples import Samples
from gradwire.server.shard.making import SteppedStore
from gradwire.server.shard.mean import Push
from gradwire.settings import ServerSettings

Array = npt.NDArray[np.float32]
SHAPES = ((5, 3), (2,), ())
MANIFEST = Manifest(
    tuple(Tensor(name=f"t{i}", shape=shape, dtype="float32") for i, shape in enumerate(SHAPES)), 100
)


PLAN = cut_plan((4, 4, 4, 3), (2,), (1,))


def gradient(seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal(PLAN.elements).astype(np.float32)


def cut(whole: Array, wanted: frozenset[int] | None = None) -> Push:
    """Some parts of a gradient."""
    return {
        number: [dense(*whole[part.start : part.end])]
        for number, part in enumerate(PLAN.parts)
        if wanted is None or number in wanted
    }


def elements(parts: frozenset[int]) -> list[int]:
    return [at for part in parts for at in range(PLAN.parts[part].start, PLAN.parts[part].end)]


def mean(*shares: Share) -> Array:
    """Return the change of a store's parameters by these pushes."""
    options, zeros = parse_optimizer("sgd"), [np.zeros(spec.elements, np.float32) for spec in MANIFEST.specs]
    store = SteppedStore(MANIFEST, zeros, "none", lambda ps: Optimizer(options, ps, 1.0), plan=PLAN)
    apply(store, version=1, shares=shares)
    return -np.concatenate([value.view(np.float32) for value in store.values()])


# ---- sums


@pytest.mark.parametrize("slices", [2, 3, 4])
def test_slices_come_to_the_mean_of_the_groups(slices: int) -> None:
    parts = [PLAN.slice(number, slices) for number in range(slices)]
    assert sorted(part for each in parts for part in each) == list(range(len(PLAN.parts)))
    found = mean(
        *(
            pushed(samples, cut(gradient(group), parts[number]), slice=number)
            for group, samples in enumerate((8, 8, 4))
            for number in range(slices)
        )
    )
    expected = sum(n / 20 * gradient(group) for group, n in enumerate((8, 8, 4)))
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_a_slice_that_is_missing_is_missing_in_its_parts_alone() -> None:
    first, second = (PLAN.slice(number, 2) for number in range(2))
    shares = [
        pushed(8, cut(gradient(0), first), slice=0),
        pushed(8, cut(gradient(0), second), slice=1),
        pushed(8, cut(gradient(1), first), slice=0),
    ]
    found, one, other = mean(*shares), gradient(0), gradient(1)
    np.testing.assert_allclose(found[elements(first)], (one + other)[elements(first)] / 2, rtol=1e-6)
    np.testing.assert_allclose(found[elements(second)], one[elements(second)], rtol=1e-6)
    found = mean(shares[0])
    assert found[elements(first)].all()
    assert not found[elements(second)].any(), "nobody has pushed it"


def test_what_comes_along_outside_of_a_slice_is_added_with_its_weight() -> None:
    parts = [PLAN.slice(number, 2) for number in range(2)]
    found = mean(
        pushed(8, cut(gradient(0), parts[0]), slice=0),
        pushed(8, cut(gradient(0), parts[1]), slice=1),
        pushed(8, cut(gradient(1)), slice=0),
        pushed(8, cut(gradient(2), parts[1]), slice=1),
    )
    first, along, second = (gradient(seed) for seed in range(3))
    for places, expected in zip(map(elements, parts), (first + along, first + along + second), strict=True):
        np.testing.assert_allclose(found[places], expected[places] / 2, rtol=1e-6, atol=1e-7)


# ---- how a round is divided


def test_groups_are_as_large_as_the_members_allow() -> None:
    assert [largest_divisor(n, 4) for n in (1, 2, 3, 4, 5, 6, 8, 9)] == [1, 2, 3, 4, 1, 3, 4, 3]
    division = divide(Sharing(redundancy=4), Samples(100, 2), 4, 1, 6, 0)
    assert isinstance(division, Sliced)
    assert [part.slice for part in division.parts] == [0, 1, 2, 0, 1, 2]
    assert [part.position for part in division.parts] == [0, 0, 0, 1, 1, 1]
    assert {part.samples for part in division.parts} == {12}
    assert division.note == "redundancy=4: a round of 6 members is divided in groups of 3"


def test_an_epoch_that_ends_may_leave_groups_without_samples() -> None:
    division = divide(Sharing(redundancy=2), Samples(1, 1), 4, 1, 4, 0)
    assert isinstance(division, Sliced)
    assert len(division.parts) == 2


@pytest.mark.parametrize(("late", "stragglers"), [(0, 2), (1, 1), (2, 0), (3, 0)])
def test_who_is_late_counts_among_those_that_a_code_does_without(late: int, stragglers: int) -> None:
    division = divide(Sharing(stragglers=2), Samples(100, 2), 4, 1, 5, late)
    assert division is not None
    assert isinstance(division, StragglerCoded) == (stragglers > 0)
    assert {part.stragglers for part in division.parts} == {stragglers}
    assert division.needed == 5 - stragglers


# ---- options


@pytest.mark.parametrize(
    ("mode", "changes", "why"),
    [
        ("sync:redundancy=2", {"aggregation": "median"}, "--aggregation median: not with --mode sync:red"),
        ("sync:stragglers=2", {"min_workers": 2}, "--min-workers 2: --mode sync:stragglers=2 .*at least 3"),
        ("sync:backup=1", {"min_workers": 1}, "--min-workers 1: --mode sync:backup=1 .*at least 2"),
        (
            "local",
            {"clip_norm": 1.5},
            "--clip-norm 1.5: not allowed with --mode local: workers step the parameters",
        ),
        ("coded", {"clip_norm": 1.0}, "--clip-norm 1: not allowed with --mode coded"),
        ("sync:stragglers=1", {"script": True}, "--mode sync:stragglers=1: not with --script"),
    ],
)
def test_options_that_do_not_go_together(mode: str, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        check(dataclasses.replace(ServerSettings(mode=mode), **changes))


@pytest.mark.parametrize(
    ("mode", "why"),
    [
        ("sync:redundancy=auto", "redundancy: expected a whole number, got 'auto'"),
        ("sync:redundancy=0", "redundancy: expected 1 to 4294967295, got '0'"),
        ("async:redundancy=2", "mode 'async': unknown key 'redundancy'"),
        ("local:stragglers=1", "mode 'local': unknown key 'stragglers'"),
        ("sync:redundancy=2,backup=1", "redundancy=2: not with backup=1"),
        ("sync:stragglers=1,backup=1", "stragglers=1: not with backup=1"),
        ("sync:stragglers=1,redundancy=2", "stragglers=1: not with redundancy=2"),
        ("coded:redundancy=x", "expected a whole number from 1, or auto, got 'x'"),
        ("coded:redundancy=1.5", "expected a whole number from 1, or auto"),
    ],
)
def test_modes_that_cannot_be(mode: str, why: str) -> None:
    with pytest.raises(SpecError, match=why):
        parse(mode)


@pytest.mark.parametrize(("mode", "workers"), [("sync:redundancy=2", 1), ("sync:stragglers=2", 3)])
def test_options_that_do(mode: str, workers: int) -> None:
    check(ServerSettings(mode=mode, min_workers=workers))
