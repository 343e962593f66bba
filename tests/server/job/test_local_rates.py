"""Each local step of a round has a learning rate of its own, by the schedule."""

from __future__ import annotations

import math
from typing import Any

import pytest
from jobs import Job
from stepping import core_of

from gradwire.proto.messages import Assignment, Phase
from gradwire.server.job import events as e


def rates_of(schedule: str, **terms: Any) -> tuple[list[Assignment], Job]:
    mode = "local:steps=4,correction=0"
    options = {"min_workers": 2, "batch_size": 2, "epochs": 2, "learning_rate": 0.5, **terms}
    job = Job(2, core=core_of(mode, schedule=schedule, **options), samples=36)
    found = list[Assignment]()
    while job.phase() is Phase.RUNNING:
        found.append(job.told["w0"])
        job.round(("w0", "w1"))
    return found, job


def test_rates_within_a_round_are_those_of_the_schedule_at_each_local_step() -> None:
    """Two workers with batches of 2, and 36 samples: rounds of 4, 4 and 1 local steps, twice."""
    found, _ = rates_of("cosine:warmup=3steps")
    assert [each.local_steps for each in found] == [0, 4, 8, 9, 13, 17]
    rates = [rate for each in found for rate in each.local_rates or (each.learning_rate,)]
    warmed = 3 / 18
    expected: list[float] = []
    for step in range(18):
        part = (step + 0.5) / 18
        decay = 1.0 if part <= warmed else 0.5 * (1 + math.cos(math.pi * (part - warmed) / (1 - warmed)))
        expected.append(0.5 * min(1.0, (step + 0.5) / 3) * decay)
    assert rates == pytest.approx(expected)
    assert [len(each.local_rates) for each in found] == [4, 4, 0, 4, 4, 0]


def test_rates_that_do_not_change_and_those_of_scripts_are_not_sent() -> None:
    constant, _ = rates_of("constant")
    assert [each.local_rates for each in constant] == [()] * 6
    assert {each.learning_rate for each in constant} == {0.5}
    script, _ = rates_of("cosine", script=True)
    assert [each.local_rates for each in script] == [()] * 6
    assert [each.local_steps for each in script] == [0, 4, 8, 9, 13, 17]


def test_a_round_whose_changes_are_not_finite_counts_its_steps() -> None:
    job = Job(
        2, core=core_of("local:steps=4,correction=0", min_workers=2, batch_size=2, epochs=2), samples=36
    )
    first = job.told["w0"]
    for name in ("w0", "w1"):
        job.push(name, samples=0)
    job.publish()
    assert (first.local_steps, job.told["w0"].local_steps) == (0, 4)


def test_steps_limit_a_schedule_in_rounds_and_divide_it_in_local_steps() -> None:
    found, _ = rates_of("cosine", epochs=0, max_steps=2)
    rates = [rate for each in found for rate in each.local_rates]
    assert rates == pytest.approx([0.25 * (1 + math.cos(math.pi * (at + 0.5) / 8)) for at in range(8)])


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ("cosine:warmup=17steps", ""),
        ("cosine:warmup=18steps", "its warm-up of 18 steps takes the whole job, which has 18 steps"),
        ("constant:warmup=2", "its warm-up of 2 epochs takes the whole job, which has 2 epochs"),
        ("constant:warmup=1.9", ""),
        ("cosine:warmup=10%", ""),
        ("cosine:warmup=100%", "its warm-up of 100 percent takes the whole job, which has 100 percent"),
        ("constant", ""),
    ],
)
def test_a_warm_up_that_takes_the_whole_job_is_warned_of_once(schedule: str, words: str) -> None:
    """18 local steps in two epochs."""
    options: dict[str, Any] = {"min_workers": 2, "batch_size": 2, "epochs": 2, "learning_rate": 0.5}
    core = core_of("local:steps=4,correction=0", schedule=schedule, **options)
    job = Job(2, core=core, samples=36)
    said = [each.text for each in job.all(e.Note) if each.warning]
    job.round(("w0", "w1"))
    assert not job.all(e.Note)
    assert len(said) == bool(words)
    assert all(words in each and "--learning-rate 0.5; use a shorter warm-up" in each for each in said)
