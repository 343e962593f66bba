"""Rounds that begin with a worker's unsent changes applied (`local:overlay=on`), and clipped local steps
(`local:clip`), against the recipe in numpy."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from layered import ORDER, Overlap, Run, gradients, initial, layers_of, local_run, rounds, sent_in, stepped

RATE, WORKERS = 0.1, 4


def overlaid(compressor: str, overlap: Overlap = "backward", options: str = "overlay=on") -> Run:
    return local_run(options, compressor, overlap, world=WORKERS)


@pytest.mark.parametrize("decay", [1.0, 0.9])
@pytest.mark.parametrize("kind", ["1bit", "topk:ratio=8"])
@pytest.mark.parametrize("overlay", [True, False])
def test_rounds_are_those_of_the_recipe(overlay: bool, kind: str, decay: float) -> None:
    """Base, steps, residual and what is sent, with e that no process but the worker has."""
    spec = f"{kind}{',' if ':' in kind else ':'}decay={decay}"
    run = rounds(overlaid(spec, options="overlay=on" if overlay else ""), 0, 4)
    first, share = initial(run), np.float32(1 / WORKERS if overlay else 0.0)
    residual = np.zeros_like(first)
    for version in range(4):
        base = first * np.float32(1 + version / 8) - share * residual
        change = base - stepped(base, version)
        residual = np.float32(decay) * residual + change - sent_in(run, version)
    assert (np.abs(residual).max(axis=(1, 2)) > 1e-4).all()
    np.testing.assert_allclose(layers_of(run.residual), residual, rtol=1e-3, atol=2e-6)
    assert not np.asarray(run.residual).reshape(4, -1)[2].any()


def test_sums_of_what_is_sent_and_held_are_sums_of_changes() -> None:
    """The ledger's contract: with an overlay, too, nothing is lost or counted twice."""
    run, plain = overlaid("topk:ratio=8"), overlaid("none")
    rounds(run, 0, 1)
    rounds(plain, 0, 1)
    total = sent_in(run) + layers_of(run.residual)
    np.testing.assert_allclose(total, sent_in(plain), rtol=1e-6, atol=1e-8)


def test_when_changes_leave_does_not_matter_and_the_replica_returns() -> None:
    first, other = (rounds(overlaid("1bit", overlap), 0, 4) for overlap in ("off", "backward"))
    assert first.pushed == other.pushed
    for place, value in enumerate(first.first):
        moved = value.view(np.float32) * np.float32(1 + (3 / 8 if place != 2 else 0))
        np.testing.assert_array_equal(first.replica.values()[place].view(np.float32), moved)


def test_nothing_held_back_means_the_bits_of_plain_rounds() -> None:
    assert rounds(overlaid("none"), 0, 3).pushed == rounds(overlaid("none", options=""), 0, 3).pushed
    assert rounds(overlaid("1bit"), 0, 3).pushed != rounds(overlaid("1bit", options=""), 0, 3).pushed


def test_a_worker_that_returns_with_its_residual_continues_as_if_it_had_stayed() -> None:
    whole, half, later = (overlaid("1bit") for _ in range(3))
    rounds(whole, 0, 4)
    rounds(half, 0, 2)
    kept: Any = half.trainer.session.compression  # pyright: ignore[reportPrivateUsage]
    new: Any = later.trainer.session.compression  # pyright: ignore[reportPrivateUsage]
    new.restore(copy.deepcopy(kept.image()))
    assert rounds(later, 2, 4).pushed == whole.pushed[2:]


def test_local_steps_are_clipped_to_the_norm_of_the_whole_gradient() -> None:
    limit = 0.01
    run = rounds(overlaid("none", options=f"clip={limit}"), 0, 1)
    x = first = initial(run)
    for at in (0, 2):
        found = np.stack(gradients(list(x), ORDER[at : at + 2]))
        norm = np.sqrt(np.square(found.astype(np.float64)).sum())
        assert norm > limit
        x = x - np.float32(RATE * limit / norm) * found
    np.testing.assert_allclose(sent_in(run), first - x, rtol=1e-3, atol=1e-6)
    far = rounds(overlaid("none", options="clip=1e9"), 0, 1)
    assert far.bytes_of() == rounds(overlaid("none", options=""), 0, 1).bytes_of()
