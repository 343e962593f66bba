"""New plans while a job runs: measurements go to the planner, and its plans to the conductor.

A new plan comes into force in two steps. `Conductor.replan` prepares it under the next number. Control only
knows that a plan waits, and puts it in force (`Adopt`) as soon as the mode is quiet. Modes with rounds are
quiet between two rounds. `stale` and `async` stop accepting pushes and assigning samples, and are quiet once
all accepted pushes are applied.

Stored parts of open pushes are dropped then. A push under an older plan answers an assignment that is late by
then, so it is stale. Its parts are ignored, and its commit is decided without them (`Commit.plan`). After a
reconnect (`Welcome.plan`) the worker sends the commit alone.

Workers derive no plan. The server sends each worker the new plan after the updates under the old one, and
before any message that depends on the new one (`Publishing.send_plan_if_stale`). An assignment names its
plan, and waits at the worker for it. Updates under the old plan are not kept. Members that listen get the
missing ones first; workers that return later get a snapshot.

A plan changes views, not values: parameters, residuals, velocities and all state of compressors and optimizer
belong to elements or tensors. A plan therefore does not affect the bits, except for a merged one
(`compressors/merging`). Coded mode keeps its first plan, for snapshots, and ignores others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace

from ...common.parts import Plan
from ...common.spec import SpecError
from ...compressors import AUTO, compressor_for, known_compressor
from ...planning import is_measured, parse_fusion, parse_order, parse_replan
from ...planning.job import JobProfile, StepOptions, bandwidth_of
from ...planning.predictions import predict
from ...proto import messages as m
from ...proto.manifest import Manifest
from ...proto.plans import plan_message, plan_of
from ..job.state import JobState
from ..metrics import ServerMetrics
from ..shard.shard import Shard
from .planner import FULL, Measurements, Planner, alike
from .rate_control import PartArrival

log = logging.getLogger("gradwire.server")


def fixed() -> Planner:
    """Return a planner that makes the first plan only."""
    return Planner(parse_fusion("bytes"), parse_order("fifo"), parse_replan("never"))


def compressor_in(manifest: Manifest | None, compressor: str) -> str:
    """Return a member's compressor; instead of the job's `auto` the one that it chooses, once the model is
    known."""
    if compressor != AUTO or manifest is None:
        return compressor
    return str(compressor_for(compressor, manifest.specs)[0])


def chosen_steps(state: JobState, manifest: Manifest | None) -> tuple[StepOptions, int] | None:
    """Return the options of the job's steps, with the first member's compressor, and the number of members.
    None if these steps cannot be predicted."""
    rules, members = state.rules, state.roster.by_rank()
    compressor = known_compressor(compressor_in(manifest, members[0].compressor)) if members else None
    if compressor is None:
        return None
    try:
        sent = compressor.compression()
    except SpecError:  # steps with this compressor cannot be predicted
        return None
    choice = StepOptions(
        compressor=sent,
        mode=rules.mode,
        overlap=rules.overlap,
        fusion=rules.fusion,
        order=rules.order,
        part_bytes=rules.part_bytes,
        entropy="off",  # the link is measured by bytes before packing
    )
    return choice, len(members)


class Replanning:
    """The making of new plans, and the prediction of a step's time. The conductor owns it, on its event loop;
    plans are made on another thread.

    Attributes:
        planner: keeps the measurements and makes plans.
        prepared: plan with the next number, which waits to be adopted; None without one.
        predicted_s: predicted time of a step by the last profile, in seconds; 0 if unknown.
    """

    def __init__(
        self,
        planner: Planner,
        shard: Shard,
        metrics: ServerMetrics,
        *,
        adopt: Callable[[Plan], None],
        work: Callable[[Awaitable[None]], None],
        chosen: Callable[[], tuple[StepOptions, int] | None] = lambda: None,
    ) -> None:
        """
        Args:
            planner: keeps the measurements and makes plans.
            adopt: called with each new plan, to put it in force.
            work: runs an awaitable in the background, and handles its failure.
            chosen: returns the options of the job's steps and the number of workers; None if they are
                unknown."""
        self.planner = planner
        self._reported, self._metrics = shard.reported, metrics
        self._adopt, self._work, self._chosen = adopt, work, chosen
        self.prepared: Plan | None = None
        self.predicted_s = 0.0  # time of a step by the last profile; 0 if unknown
        self._due = False  # a plan is due, and may have to wait for norms
        self._planning = self._predicting = False
        self._predicted_for = 0, 0  # plan and version of the last prediction

    def prepare(self, plan: Plan) -> Plan:
        """Keep a plan, under the next number, until `take_prepared`, and return it. The job must have
        parameters. Raises Refused (PLAN) if the model cannot be divided by this plan."""
        known = self._reported
        assert known.manifest is not None, "a plan needs the parameters"
        following = replace(plan, number=known.plan.number + 1, norms=known.plan.norms)
        self.prepared = plan_of(plan_message(following), known.manifest)
        return self.prepared

    def take_prepared(self, number: int) -> Plan:
        """Return the prepared plan, which has this number, and forget it."""
        plan, self.prepared = self.prepared, None
        assert plan is not None
        assert plan.number == number
        return plan

    def arrived(self, arrival: PartArrival) -> None:
        """Record the arrival of a part."""
        self.planner.arrived(arrival)

    def profiled(self, worker: str, incarnation: int, profile: m.Profile) -> None:
        """Record a worker's profile, and start to predict the time of a step if plan or version call for
        it."""
        self.planner.profiled(worker, incarnation, profile)
        measured = self.measured()
        if measured is None:
            return
        self._metrics.measured(measured)
        # A prediction takes tenths of a second, and workers send profiles at about the same time.
        plan, version = self._reported.plan.number, self._reported.version
        if plan != self._predicted_for[0] or version >= self._predicted_for[1] + FULL:
            self._predicted_for = plan, version
            self._work(self._predict(measured))

    async def _predict(self, measured: Measurements) -> None:
        """Predict the time of a step from the measurements."""
        chosen, manifest = self._chosen(), self._reported.manifest
        if chosen is None or manifest is None or self._predicting:
            return
        self._predicting = True
        choice, workers = chosen
        self.predicted_s = 0.0
        try:
            rate = bandwidth_of(measured.link, workers)
            profile = JobProfile(
                shapes=[tensor.shape for tensor in manifest.tensors],
                forward_s=[layer.forward_s for layer in measured.layers],
                backward_s=[layer.backward_s for layer in measured.layers],
                worker_bandwidth=rate,
                server_bandwidth=rate,
                workers=workers,
                start_s=measured.link.start_s,
                cores=measured.cores,
                on_cores=measured.processor_share,
                square_norms=measured.square_norms,
            )
            predicted = await asyncio.to_thread(predict, profile, choice)
            self.predicted_s = predicted.step_s
        except ValueError:  # this mode or compressor cannot be predicted
            pass
        except Exception:  # a prediction is for people only, so its failure does not end the job
            log.exception("the time of a step could not be predicted; please report this")
        finally:
            self._predicting = False
        self._metrics.predicted_step_seconds.set(self.predicted_s)

    def measured(self) -> Measurements | None:
        """Return the measurements so far; None before the first profile."""
        manifest = self._reported.manifest
        return None if manifest is None else self.planner.measured(manifest, self._reported.square_norms)

    def published(self, version: int) -> None:
        """Start to make a plan, if one is due and its inputs are known. Called after each published version.

        A plan that takes norms waits until there are some, and until the versions that are being measured are
        over."""
        planner = self.planner
        if self._planning or self._reported.manifest is None:
            return
        self._due = self._due or planner.due(version)
        if not self._due or (
            planner.takes_norms and (is_measured(version) or not self._reported.square_norms)
        ):
            return
        measured = self.measured()
        if measured is None:
            return
        self._due = False
        self._planning = True
        self._work(self._plan(version, measured))

    async def _plan(self, version: int, measured: Measurements) -> None:
        """Make a plan on another thread, and put it in force if it differs from the present one."""
        plan: Plan | None = None
        planner, manifest = self.planner, self._reported.manifest
        assert manifest is not None
        try:
            plan = await asyncio.to_thread(planner.plan, version, manifest, measured)
        except Exception:  # the job continues with the present plan
            log.exception("no new plan could be made, so the present one stays; please report this")
        finally:
            self._planning = False
        if plan is None:
            return
        if planner.takes_norms and log.isEnabledFor(logging.DEBUG):
            for index, reason in enumerate(planner.reasons(measured)):
                names = [manifest.tensors[each].name for each in (index, index + 1)]
                log.debug("%s and %s: %s", *names, f"not merged: {reason}" if reason else "merged")
        if alike(plan, self._reported.plan):
            return
        log.info(
            "new plan: %d units in %d parts, because a part takes %.2f ms plus %.0f ns per byte",
            *(len(plan.units), len(plan.parts), measured.link.start_s * 1e3, measured.link.byte_s * 1e9),
        )
        self._adopt(plan)
