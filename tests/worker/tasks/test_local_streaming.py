"""Rounds that exchange one fragment of the model each (`local:fragments`), against the recipe in numpy."""

from __future__ import annotations

import copy
from typing import Any, cast

import numpy as np
import pytest
import torch
from layered import USED, WIDTH, Run, initial, layers_of, local_run, rounds, sent_in, stepped

from gradwire.worker.training.fragments import fragments_of
from gradwire.worker.training.local import LocalStrategy

WORKERS = 4
FRAGMENTS = 0, 1, 1  # of these layers, where there are two


def streamed(compressor: str = "none", options: str = "fragments=2") -> Run:
    return local_run(options, compressor, world=WORKERS)


def strategy_of(run: Run) -> LocalStrategy:
    return cast("LocalStrategy", run.trainer._driver.strategy)  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize(
    ("compressor", "options"), [("none", ""), ("1bit:decay=0.9", ",overlay=on"), ("none", ",delayed=on")]
)
def test_rounds_are_those_of_the_recipe(compressor: str, options: str) -> None:
    """Delayed, a round begins at the model before, less the change that is being exchanged."""
    count = 5
    run, delayed = rounds(streamed(compressor, f"fragments=2{options}"), 0, count), "delayed" in options
    first = initial(run)
    residual = carried = pushed = np.zeros_like(first)
    share, decay = (1 / WORKERS, 0.9) if "overlay" in options else (0.0, 1.0)
    due = np.zeros(0)
    for version in range(count):
        at, flying = (max(0, version - 1), pushed) if delayed else (version, 0 * pushed)
        base = first * np.float32(1 + at / 8) - np.float32(share) * residual - carried - flying
        total, sent = carried + base - stepped(base, version), sent_in(run, version)
        due = np.array([fragment == version % 2 for fragment in FRAGMENTS])
        assert (sent.any(axis=(1, 2)) == due).all()
        if compressor == "none":
            np.testing.assert_allclose(sent[due], total[due], rtol=1e-3, atol=2e-6)
        mine = due[:, None, None]
        residual = np.where(mine, np.float32(decay) * residual + total - sent, residual)
        pushed, carried = np.where(mine, total, 0), np.where(mine, 0, total)
    found = [run.trainer.session.compression.carried[layer] for layer in USED]
    assert [each is None for each in found] == due.tolist()
    kept = [np.zeros((WIDTH, WIDTH)) if each is None else np.asarray(each) for each in found]
    np.testing.assert_allclose(kept, carried, rtol=1e-3, atol=2e-6)
    if compressor != "none":
        assert np.abs(residual).max() > 1e-4
        np.testing.assert_allclose(layers_of(run.residual), residual, rtol=1e-3, atol=2e-6)


def test_the_replica_returns_to_the_model() -> None:
    run = rounds(streamed(), 0, 4)
    for place, value in enumerate(run.first):
        moved = value.view(np.float32) * np.float32(1 + (3 / 8 if place != 2 else 0))
        np.testing.assert_array_equal(run.replica.values()[place].view(np.float32), moved)


def test_a_worker_that_leaves_pushes_what_it_carries() -> None:
    run = rounds(streamed(), 0, 2)
    assert any(each is not None for each in run.trainer.session.compression.carried)
    session = run.trainer.session
    assert session.held_back > 0
    session.leave()
    assert not session.finished_leaving
    rounds(run, 2, 3)
    assert session.held_back == 0
    assert all(each.any() for each in sent_in(run, 2))
    assert not any(each is not None for each in run.trainer.session.compression.carried)


@pytest.mark.parametrize("missed", [0, 1])
def test_a_worker_that_returns_carries_on_at_its_version_alone(missed: int) -> None:
    """At another version the job may have the carried changes already."""
    whole, half, later = (streamed("1bit") for _ in range(3))
    rounds(whole, 0, 5)
    rounds(half, 0, 2)
    kept: Any = half.trainer.session.compression  # pyright: ignore[reportPrivateUsage]
    tree: dict[str, Any] = {"compression": copy.deepcopy(kept.image()), "buffers": {}}
    assert any(each is not None for each in tree["compression"]["carried"])
    later.trainer.session.saving.restore(2, tree, 2)
    rounds(later, 2 + missed, 5)
    same = later.pushed[0] == whole.pushed[2 + missed]
    assert same == (missed == 0)
    if missed:
        assert rounds(streamed("1bit"), 3, 5).pushed == later.pushed


def test_a_round_whose_waiting_change_is_not_finite_is_left_out() -> None:
    run = streamed(options="fragments=4")  # at version 2 it is the turn of the layer that no loss depends on

    def step_here(evaluate: Any) -> None:
        with torch.no_grad():
            run.replica.parameters[3].fill_(torch.inf)

    strategy = strategy_of(run)
    strategy.optimizer.step_here = step_here  # type: ignore[method-assign]
    rounds(run, 2, 3)
    assert run.trainer.session.compression.carried == ()  # as before the round
    assert run.bytes_of(0) == []


def test_fragments_are_of_about_equal_size_and_none_is_empty() -> None:
    sizes = [5, 1, 9, 3, 3, 2, 8, 1]
    for count in (1, 2, 3, 4):
        found = fragments_of(sizes, count)
        loads = [
            sum(size for size, each in zip(sizes, found, strict=True) if each == i) for i in range(count)
        ]
        assert min(loads) > 0
        assert max(loads) - min(loads) <= 2
    assert sorted(fragments_of([4, 4, 4], 8)) == [0, 1, 2]
    assert fragments_of([], 3) == []
