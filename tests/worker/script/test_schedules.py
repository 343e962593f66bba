"""Schedulers that are brought to where a job is are those that have been there all the time."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as s

from gradwire.worker.script.schedules import Schedules
from gradwire.worker.script.terms import ScriptError

STEPS = 30
SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], s.LRScheduler]] = {
    "lambda": lambda optimizer: s.LambdaLR(optimizer, lambda step: 1 / (step + 1)),
    "cosine": lambda optimizer: s.CosineAnnealingLR(optimizer, STEPS),
    "restarts": lambda optimizer: s.CosineAnnealingWarmRestarts(optimizer, 7),
    "one cycle": lambda optimizer: s.OneCycleLR(optimizer, 1.0, STEPS),
    "sequence": lambda optimizer: s.SequentialLR(
        optimizer, [s.LinearLR(optimizer), s.ExponentialLR(optimizer, 0.9)], [6]
    ),
    "chain": lambda optimizer: s.ChainedScheduler(
        [s.ConstantLR(optimizer, 0.5, 4), s.StepLR(optimizer, 5)], optimizer
    ),
}


def optimizer() -> torch.optim.Optimizer:
    groups: list[Any] = [{"params": [torch.ones(2)]}, {"params": [torch.ones(3)], "lr": 0.3}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def rates(of: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in of.param_groups]


@pytest.mark.parametrize("name", SCHEDULES)
def test_one_that_follows_late_has_the_rates_of_the_others_to_the_bit(name: str) -> None:
    first, second = optimizer(), optimizer()
    there, late, schedules = SCHEDULES[name](first), SCHEDULES[name](second), Schedules()
    schedules.follow(late, "step")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for version in range(STEPS):
            if version >= 11 and version != 14:  # which it does not hear of
                schedules.catch_up(version, 0)
                assert rates(second) == rates(first)
                second.step()
                late.step()
            first.step()
            there.step()


def test_one_of_epochs_follows_these_and_what_is_ahead_stays() -> None:
    ours = optimizer()
    scheduler, schedules = s.ExponentialLR(ours, 0.5), Schedules()
    schedules.follow(scheduler, "epoch")
    for epoch, steps in ((0, 0), (2, 2), (1, 2), (2, 2), (3, 3)):
        schedules.catch_up(100, epoch)
        assert scheduler.last_epoch == steps
    assert rates(ours) == [0.1 / 8, 0.3 / 8]


def test_a_plateau_is_seen_by_all_at_once_and_by_a_late_worker_as_by_the_others() -> None:
    losses = [1.0, 0.5, 0.6, 0.7, 0.4, 0.45, 0.46, 0.2]
    alone, first = optimizer(), optimizer()
    plain = s.ReduceLROnPlateau(alone, factor=0.5, patience=0)
    schedules = Schedules()
    schedules.follow(s.ReduceLROnPlateau(first, factor=0.5, patience=0), "step", "valid")
    known: list[dict[str, float]] = []
    saved: list[Any] = []
    for loss in losses:
        known.append({"valid": loss})
        plain.step(loss)
        saved.append((deepcopy(plain.state_dict()), deepcopy(alone.state_dict())))
        for _ in range(2):  # before each batch
            schedules.evaluated(known)
        assert rates(first) == rates(alone)
        late, joined = optimizer(), Schedules()
        joined.follow(s.ReduceLROnPlateau(late, factor=0.5, patience=0), "step", "valid")
        joined.evaluated(known)
        assert rates(late) == rates(alone)
    for states in saved:  # a worker that has loaded one
        restarted, resumed = optimizer(), Schedules()
        again = s.ReduceLROnPlateau(restarted, factor=0.5, patience=0)
        again.load_state_dict(states[0])
        restarted.load_state_dict(states[1])
        resumed.follow(again, "step", "valid")
        resumed.evaluated(known)
        assert rates(restarted) == rates(alone)


def test_a_metric_that_no_evaluation_has_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    schedules = Schedules()
    schedules.follow(s.ReduceLROnPlateau(optimizer()), "step", "valid")
    for _ in range(2):
        schedules.evaluated([{"loss": 1.0}])
    said = "job.follow(metric='valid'): no such number in the evaluation, which has: loss"
    assert caplog.text.count(said) == 1


def test_one_that_goes_by_progress_has_the_rate_of_the_present_batch() -> None:
    ours, schedules, part = optimizer(), Schedules(), 0.0
    schedules.follow(s.LambdaLR(ours, lambda _: 1 - part), "progress")
    for part in (0.0, 0.25, 0.3, 1.0):
        schedules.catch_up(7, 0)
        assert rates(ours) == [0.1 * (1 - part), 0.3 * (1 - part)]


@pytest.mark.parametrize(
    ("name", "length"), [("lambda", 0), ("cosine", STEPS), ("restarts", 0), ("one cycle", STEPS)]
)
def test_the_log_names_a_schedule_that_is_longer_or_shorter_than_the_job(
    name: str, length: int, caplog: pytest.LogCaptureFixture
) -> None:
    schedules = Schedules()
    schedules.follow(SCHEDULES[name](optimizer()), "step")
    schedules.check(length, 3)
    schedules.check(0, 3)
    assert not caplog.records
    for steps in (length + 1, length + 5):
        schedules.check(steps, 3)
    assert [
        f"made for {length} steps, and the job takes {length + 1}" in each for each in caplog.messages
    ] == ([True] if length else [])


def test_the_length_of_a_sequence_is_where_its_last_schedule_ends(caplog: pytest.LogCaptureFixture) -> None:
    ours, schedules = optimizer(), Schedules()
    parts: list[s.LRScheduler] = [s.LinearLR(ours, total_iters=5), s.CosineAnnealingLR(ours, 20)]
    schedules.follow(s.SequentialLR(ours, parts, [5]), "step")
    schedules.check(25, 0)
    assert not caplog.records
    schedules.check(24, 0)
    assert "SequentialLR is made for 25 steps, and the job takes 24: its rates do not reach" in caplog.text


@pytest.mark.parametrize(
    ("scheduler", "each", "words"),
    [
        (s.ExponentialLR(optimizer(), 0.5), "round", "expected 'step', 'epoch' or 'progress'"),
        (
            s.ExponentialLR(optimizer(), 0.5),
            "progress",
            "ExponentialLR depends on its own count; pass a LambdaLR",
        ),
        (print, "step", "got a builtin_function_or_method; advance it to step job.version yourself"),
    ],
)
def test_what_cannot_follow_is_refused_by_name(scheduler: Any, each: Any, words: str) -> None:
    with pytest.raises(ScriptError, match=words):
        Schedules().follow(scheduler, each)
