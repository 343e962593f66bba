"""Calls of the planner while a job runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from test_planner import link, manifest, profile

from gradwire.common.parts import Plan
from gradwire.planning import NORM_VERSIONS, is_measured, parse_fusion, parse_order, parse_replan
from gradwire.planning.job import StepOptions
from gradwire.server.metrics import ServerMetrics
from gradwire.server.plans.planner import FULL, Planner
from gradwire.server.plans.replanning import Replanning
from gradwire.server.shard.reports import Reported

MODEL = manifest()


class Shard:
    """Only reports."""

    def __init__(self) -> None:
        self.reported = Reported()
        self.reported.manifest, self.reported.plan = MODEL, MODEL.plan()


@asynccontextmanager
async def running(
    fusion: str = "seamgs", replanning: str = "100", choice: StepOptions | None = None
) -> AsyncGenerator[tuple[Any, Shard, list[Plan]]]:
    planner = Planner(parse_fusion(fusion), parse_order("fifo"), parse_replan(replanning))
    planner.first(MODEL)
    shard: Any = Shard()
    plans, tasks = list[Plan](), list[asyncio.Future[None]]()

    def work(what: Awaitable[None]) -> None:
        tasks.append(asyncio.ensure_future(what))

    found: Any = Replanning(
        *(planner, shard, ServerMetrics("none")),
        adopt=plans.append,
        work=work,
        chosen=lambda: None if choice is None else (choice, 2),
    )
    found.tasks = tasks
    link(planner, 1.0, 1e-9)
    yield found, shard, plans
    await asyncio.gather(*tasks)


async def settled(job: Any) -> None:
    await asyncio.gather(*job.tasks)


def norms(value: float) -> tuple[float, ...]:
    """One norm for each tensor."""
    return tuple([value] * len(MODEL.tensors))


@pytest.mark.parametrize("replanning", ["10", "drift"])
async def test_a_plan_waits_for_norms_and_for_the_end_of_a_window(replanning: str) -> None:
    async with running(replanning=replanning) as (job, shard, plans):
        job.profiled("a", 1, profile(MODEL))
        for version in range(1, NORM_VERSIONS):  # these are being measured
            shard.reported.square_norms = norms(float(version))
            job.published(version)
        assert plans == []
        assert not is_measured(NORM_VERSIONS)
        shard.reported.square_norms = ()  # as if no version had had a gradient
        job.published(NORM_VERSIONS)
        assert plans == []
        shard.reported.square_norms = norms(3.0)
        job.published(NORM_VERSIONS + 1)
        await settled(job)
        assert [len(plan.units) for plan in plans] == [1]
        assert job.measured().square_norms == norms(3.0)
        job.published(NORM_VERSIONS + 2)
        await settled(job)
        assert len(plans) == 1


async def test_a_plan_that_falls_due_within_a_window_is_made_after_it() -> None:
    """With `drift` a plan is due at each 50th version only, and stays due until it is made."""
    async with running(replanning="drift") as (job, shard, plans):
        shard.reported.square_norms = norms(1.0)
        job.profiled("a", 1, profile(MODEL))
        job.published(8)
        await settled(job)
        assert len(plans) == 1
        job.profiled("a", 1, replace(profile(MODEL), backward_seconds=(9.0,) * len(MODEL.tensors)))
        window = [version for version in range(790, 810) if is_measured(version)]
        assert window[0] < 800 < window[-1]
        for version in window:
            job.published(version)
        await settled(job)
        assert len(plans) == 1
        job.published(window[-1] + 1)
        await settled(job)
        assert len(plans) == 2


async def test_the_log_has_the_reason_of_each_pair(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "gradwire.server")
    async with running(replanning="never") as (job, shard, _):
        job.profiled(
            "a", 1, replace(profile(MODEL), backward_seconds=(9.0,) + (0.0,) * (len(MODEL.tensors) - 1))
        )
        shard.reported.square_norms = norms(1.0)
        job.published(100)
        await settled(job)
    names = [tensor.name for tensor in MODEL.tensors]
    assert f"{names[0]} and {names[1]}: not merged: Q1" in caplog.text
    assert f"{names[1]} and {names[2]}: merged" in caplog.text


async def test_a_planner_that_fails_leaves_the_plan_and_the_job(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*given: Any) -> Plan:
        raise ZeroDivisionError

    monkeypatch.setattr(Planner, "plan", fails)
    monkeypatch.setattr("gradwire.server.plans.replanning.predict", fails)

    async with running(fusion="mgwfbp", choice=StepOptions()) as (job, _, plans):
        job.profiled("a", 1, profile(MODEL))
        job.published(5)
        await settled(job)
        assert plans == []
        assert job.predicted_s == 0.0
    assert "no new plan could be made" in caplog.text
    assert "the time of a step could not be predicted" in caplog.text


async def test_a_step_is_predicted_once_for_all_that_say_so_at_the_same_time() -> None:
    async with running(choice=StepOptions()) as (job, shard, _):
        for worker in "abc":
            job.profiled(worker, 1, profile(MODEL))
        assert len(job.tasks) == 1
        await settled(job)
        assert job.predicted_s > 0
        shard.reported.version = FULL
        job.profiled("a", 1, profile(MODEL))
        assert len(job.tasks) == 2


@pytest.mark.parametrize("mode", ["sync:backup=1", "async:rate=inverse"])
async def test_what_nobody_can_predict_has_no_figure(mode: str) -> None:
    async with running(choice=StepOptions(mode=mode)) as (job, _, _):
        job.profiled("a", 1, profile(MODEL))
        await settled(job)
        assert job.predicted_s == 0.0
