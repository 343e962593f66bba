"""Rounds that begin with a worker's unsent changes applied (`local:overlay=on`), and clipped local steps
(`local:clip`), against the recipe in numpy."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from layered import INPUTS, WIDTH, Overlap, Run, gradients, local_run, rounds

from gradwire.worker.training.sharding import epoch_order

RATE, WORKERS = 0.1, 4
USED = 0, 1, 3  # places of the layers that the loss depends on


def overlaid(compressor: str, overlap: Overlap = "backward", options: str = "overlay=on") -> Run:
    return local_run(options, compressor, overlap, world=WORKERS)


def layers_of(flat: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    return [flat.reshape(4, WIDTH, WIDTH)[place] for place in USED]


@pytest.mark.parametrize("decay", [1.0, 0.9])
@pytest.mark.parametrize("kind", ["1bit", "topk:ratio=8"])
@pytest.mark.parametrize("overlay", [True, False])
def test_rounds_are_those_of_the_recipe(overlay: bool, kind: str, decay: float) -> None:
    """Base, steps, residual and what is sent, with e that no process but the worker has."""
    order, count = epoch_order(7, 0, len(INPUTS)), 4
    spec = f"{kind}{',' if ':' in kind else ':'}decay={decay}"
    run = overlaid(spec, options="overlay=on" if overlay else "")
    first = [run.first[place].view(np.float32).reshape(WIDTH, WIDTH) for place in USED]
    residual = [np.zeros_like(each) for each in first]
    rounds(run, 0, count)
    for version in range(count):
        model = [each * np.float32(1 + version / 8) for each in first]
        share = 1 / WORKERS if overlay else 0.0
        base = [each - np.float32(share) * e for each, e in zip(model, residual, strict=True)]
        x = [each.copy() for each in base]
        for at in (4 * version, 4 * version + 2):
            x = [
                each - np.float32(RATE) * g
                for each, g in zip(x, gradients(x, order[at : at + 2]), strict=True)
            ]
        sent = np.concatenate([np.frombuffer(each, np.float32) for each in run.bytes_of(version)])
        residual = [
            np.float32(decay) * e + (began - ended) - q
            for e, began, ended, q in zip(residual, base, x, layers_of(sent), strict=True)
        ]
    found = layers_of(np.asarray(run.residual))
    for mine, theirs in zip(found, residual, strict=True):
        assert np.abs(theirs).max() > 1e-4
        np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=2e-6)
    assert not np.asarray(run.residual).reshape(4, -1)[2].any()


def test_sums_of_what_is_sent_and_held_are_sums_of_changes() -> None:
    """The ledger's contract: with an overlay, too, nothing is lost or counted twice."""
    run, plain = overlaid("topk:ratio=8"), overlaid("none")
    rounds(run, 0, 1)
    rounds(plain, 0, 1)
    sent = np.concatenate([np.frombuffer(each, np.float32) for each in run.bytes_of()])
    change = np.concatenate([np.frombuffer(each, np.float32) for each in plain.bytes_of()])
    np.testing.assert_allclose(sent + np.asarray(run.residual), change, rtol=1e-6, atol=1e-8)


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
    order, limit = epoch_order(7, 0, len(INPUTS)), 0.01
    run = overlaid("none", options=f"clip={limit}")
    first = [run.first[place].view(np.float32).reshape(WIDTH, WIDTH) for place in USED]
    rounds(run, 0, 1)
    x = [each.copy() for each in first]
    for at in (0, 2):
        found = gradients(x, order[at : at + 2])
        norm = np.sqrt(sum(float(np.square(g.astype(np.float64)).sum()) for g in found))
        assert norm > limit
        step = np.float32(RATE * limit / norm)
        x = [(each - step * g).astype(np.float32) for each, g in zip(x, found, strict=True)]
    sent = layers_of(np.concatenate([np.frombuffer(each, np.float32) for each in run.bytes_of()]))
    for began, ended, q in zip(first, x, sent, strict=True):
        np.testing.assert_allclose(q, began - ended, rtol=1e-3, atol=1e-6)
    far = rounds(overlaid("none", options="clip=1e9"), 0, 1)
    for one, other in zip(far.bytes_of(), rounds(overlaid("none", options=""), 0, 1).bytes_of(), strict=True):
        np.testing.assert_array_equal(np.frombuffer(one, np.float32), np.frombuffer(other, np.float32))
