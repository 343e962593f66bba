"""Plans while a job runs: measurements go to the planner, and its plans to the conductor.

How a plan comes into force. `Conductor.replan` prepares it under the next number. Control knows only that one
waits, and puts it in force (`Adopt`) as soon as the mode is quiet: between two rounds; in `stale` and `async`
once all accepted pushes are applied, until when they accept none and give out nothing. Stored parts of open
pushes are dropped. A push under an older plan answers work that is late by then, so it is stale: its parts
are ignored, its commit is decided without them (`Commit.plan`), and after a reconnect (`Welcome.plan`) the
worker sends the commit alone.

Workers derive no plan. Each is sent the plan behind the updates under the old one and before anything that
goes by the new one (`Publishing.divide`); an assignment names its plan, and waits at the worker for it.
Updates under the old plan are not kept: members that listen are sent those that they miss first, and later
ones get a snapshot.

A plan changes views, not values: parameters, residuals, velocities and all that compressors and the optimizer
remember belong to elements or tensors. So it does not affect the bits, but for a merged one
(`compressors/merging`). Coded mode keeps its first plan, for snapshots, and ignores others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from ...compressors import Plan
from ...planning import parse_fusion, parse_order, parse_replan
from ...planning.job import StepOptions, observed
from ...planning.predictions import predict
from ...proto import messages as m
from ..metrics import ServerMetrics
from ..shard.shard import Shard
from .planner import FULL, Measurements, Planner, alike
from .rate_control import Came

log = logging.getLogger("gradwire.server")


def fixed() -> Planner:
    """Return a planner that makes the first plan only."""
    return Planner(parse_fusion("bytes"), parse_order("fifo"), parse_replan("never"))


class Replanning:
    """Belongs to the conductor's event loop; plans are made on another thread."""

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
            adopt: is given plans that are to come into force.
            work: sees to what takes time.
            chosen: how the job runs, and with how many workers; None if that is not known.
        """
        self.planner = planner
        self._shard, self._reported, self._metrics = shard, shard.reported, metrics
        self._adopt, self._work, self._chosen = adopt, work, chosen
        self.predicted_s = 0.0  # of a step, by the last profile; 0 if that is not known
        self._norms_asked = False  # for the next plan
        self._planning = self._predicting = False
        self._predicted_for = 0, 0  # plan and version

    def arrived(self, came: Came) -> None:
        """Record the arrival of a part."""
        self.planner.arrived(came)

    def profiled(self, worker: str, incarnation: int, profile: m.Profile) -> None:
        """Record a worker's profile, and predict the time of a step by it."""
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
        """Predict the time of a step."""
        chosen, manifest = self._chosen(), self._reported.manifest
        if chosen is None or manifest is None or self._predicting:
            return
        self._predicting = True
        choice, workers = chosen
        self.predicted_s = 0.0
        try:
            profile = observed(
                [tensor.shape for tensor in manifest.tensors],
                [layer.forward_s for layer in measured.layers],
                [layer.backward_s for layer in measured.layers],
                link=measured.link,
                workers=workers,
                cores=measured.cores,
                on_cores=measured.processor_share,
                square_norms=measured.square_norms,
                groups=[layer.group for layer in measured.layers],
            )
            predicted = await asyncio.to_thread(predict, profile, choice)
            self.predicted_s = predicted.step_s
        except ValueError:  # there is no prediction for this mode or compressor
            pass
        except Exception:  # a figure for people is no reason to end a job
            log.exception("a step could not be predicted; please report this")
        finally:
            self._predicting = False
        self._metrics.predicted_step_seconds.set(self.predicted_s)

    def measured(self) -> Measurements | None:
        """Return the measurements so far; None before the first profile."""
        manifest = self._reported.manifest
        return None if manifest is None else self.planner.measured(manifest, self._reported.square_norms)

    def published(self, version: int) -> None:
        """Called when a version is published: start to plan, if a plan is due and its inputs are known."""
        planner, shard = self.planner, self._shard
        if (
            self._planning
            or self._reported.manifest is None
            or not (self._norms_asked or planner.due(version))
        ):
            return
        if planner.takes_norms and not self._norms_asked:
            self._norms_asked = True
            shard.measure_norms(version)
            return
        measured = self.measured()
        if measured is None:
            return
        if planner.takes_norms and not any(self._reported.square_norms):  # none of that version, or not yet
            shard.measure_norms(version)
            return
        self._norms_asked = False
        self._planning = True
        self._work(self._plan(version, measured))

    async def _plan(self, version: int, measured: Measurements) -> None:
        plan: Plan | None = None
        try:
            assert self._reported.manifest is not None
            plan = await asyncio.to_thread(self.planner.plan, version, self._reported.manifest, measured)
        except Exception:  # the present one serves
            log.exception("no plan could be made; please report this")
        finally:
            self._planning = False
        if plan is None or alike(plan, self._reported.plan):
            return
        log.info(
            "a new plan: %d units in %d parts, because a part takes %.2f ms and %.0f ns per byte",
            *(len(plan.units), len(plan.parts), measured.link.start_s * 1e3, measured.link.byte_s * 1e9),
        )
        self._adopt(plan)
