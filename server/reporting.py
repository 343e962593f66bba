"""Gauges of a running job, updated once a tick, and the time for which rounds wait longer than usual."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re

from ..proto.messages import Phase, Waiting
from .durable.recorder import Recorder, run_on_daemon_thread
from .job.core import Core
from .job.events import Apply, LossReported, Note, Report
from .job.loss_history import mean_loss
from .job.waiting import seconds_of
from .metrics import ServerMetrics
from .shard.reports import Applied

log = logging.getLogger("gradwire.server")

Told = Report | LossReported | Note  # actions that only inform people or members
LINE_CHARACTERS = 120
SPACE_S = 5.0  # between two looks at the free space of --state
MORE = " and others"
LOST = " is lost: "


def shortened(text: str) -> str:
    """Return a text of at most `LINE_CHARACTERS`: if it is longer, without the state of each member, and then
    without the last members. The reason why one was lost stays whole."""
    text, lost, reason = text.partition(LOST)
    if lost:
        return shortened(text) + lost + reason
    if len(text) > LINE_CHARACTERS:
        text = re.sub(r"\(([^(),]+), [^()]*\)", r"(\1)", text)
    if len(text) > LINE_CHARACTERS:
        left = text[: LINE_CHARACTERS - len(MORE)]
        text = left[: left.rfind(", ")] + MORE if ", " in left else left + MORE
    return text


def inform(action: Told, metrics: ServerMetrics, phase: Phase, uploaded: str) -> Waiting | None:
    """Inform log and metrics. Return the message for all members, if there is one: for whom a round waits,
    unless it waits no longer than healthy rounds do. uploaded: follows the text of a report."""
    match action:
        case LossReported():
            metrics.lost_members.inc()
            about = {"worker": action.worker, "rank": action.rank}
            log.warning("%s is lost: %s", action.name, action.reason, extra=about)
        case Note():
            log.log(logging.WARNING if action.warning else logging.INFO, "%s", action.text)
        case Report():
            if phase is Phase.RUNNING and metrics.healthy(action.seconds):
                return None
            text = action.text + uploaded
            log.log(logging.INFO if action.usual else logging.WARNING, "%s", shortened(text))
            return Waiting(ranks=action.ranks, seconds=action.seconds, text=text)
    return None


def update_gauges(metrics: ServerMetrics, core: Core, parts: int, now: float) -> None:
    """Update the gauges of members, versions and rounds. Called once a tick, because the time it takes grows
    with the number of members or packets.

    Args:
        parts: number of parts in the plan; 0 as long as there is none.
        now: seconds of the job's clock.
    """
    rules = core.state.rules  # a script may name the epochs while the job begins
    metrics.min_workers.set(rules.min_workers)
    metrics.target_version.set(rules.max_steps or math.nan)
    metrics.target_epoch.set(rules.epochs or math.nan)
    metrics.members.set(len(core.state.roster.members))
    metrics.version.set(core.state.version)
    metrics.learning_rate.set(core.learning_rate or math.nan)
    metrics.epoch.set(core.state.epoch + core.state.epoch_progress)
    metrics.missing.set(len(core.mode.waiting(now).ranks))
    metrics.parts.set(parts)
    metrics.follow(metrics.suspensions, core.state.suspensions)
    metrics.stalled_seconds.set(
        max((each.stalled_s for each in core.state.roster.members.values()), default=0.0)
    )
    metrics.follow(metrics.repeated_samples, core.state.repeated_samples)
    metrics.follow_mode(core.mode.gauges)
    metrics.set_phase(core.state.phase)


def count_version(
    metrics: ServerMetrics, order: Apply, report: Applied, started: float, ended: float
) -> None:
    """Record a version. started, ended: when the shard began and ended to apply it, in seconds of the job's
    clock."""
    if report.passed_over:
        metrics.passed_over.inc()
        log.warning(
            "version %d: %d gradients are too few for the aggregation; the parameters stay unchanged",
            *(order.version, report.passed_over),
        )
    metrics.gradient_norm.set(report.gradient_norm)
    metrics.reduce_seconds.observe(ended - started)
    if order.clocks_stale is not None:
        metrics.clocks_stale(order.clocks_stale)
    samples = sum(each.samples for each in order.contributions)
    loss = mean_loss([(each.loss, each.samples) for each in order.contributions])
    metrics.round_closed(ended - order.opened_at, samples, loss, order.version)


def update_durability(metrics: ServerMetrics, recorder: Recorder) -> None:
    """Update the metrics of checkpoints and journal."""
    metrics.checkpoint_version.set(math.nan if recorder.version is None else recorder.version)
    metrics.checkpoint_timestamp.set(recorder.written_at)
    metrics.checkpoint_bytes.set(recorder.bytes)
    metrics.journal_bytes.set(recorder.journal_bytes)
    metrics.follow(metrics.checkpoint_failures, recorder.failures)


async def watch_space(folder: str, metrics: ServerMetrics) -> None:
    """Export the free space of a folder's disk, as a user without privileges may use it. A disk that hangs
    holds up only this task."""
    while True:
        try:
            found = await run_on_daemon_thread(os.statvfs, folder)
            metrics.state_free_bytes.set(found.f_bavail * found.f_frsize)
        except OSError:
            metrics.state_free_bytes.set(math.nan)
        await asyncio.sleep(SPACE_S)


def count_waiting(metrics: ServerMetrics, core: Core, now: float, tick_s: float) -> None:
    """Add a tick to the time for which rounds wait too long, if the open round waits longer than usual for
    members.

    Args:
        now: seconds of the job's clock.
        tick_s: length of a tick, in seconds.
    """
    waiting = core.waiting(now)
    if core.state.phase is not Phase.RUNNING or not waiting.text or not waiting.for_others:
        return
    if metrics.overdue(seconds_of(core.state, waiting, now)):
        metrics.waiting_seconds.inc(tick_s)
