"""The answer to Status: the state of the job, for people and programs."""

from __future__ import annotations

import time

from ...common.version import __version__
from ...proto import messages as m
from ...proto.job import job_message
from ...settings import JobTerms
from ..conductor import Conductor
from ..job.roster import Member
from ..plans.replanning import compressor_in


def status_of(conductor: Conductor, job: JobTerms, request: m.StatusRequest) -> m.StatusResponse:
    """Return the state of the job that `conductor` runs."""
    core, metrics, now = conductor.core, conductor.metrics, conductor.now()
    roster = core.state.roster
    departed = tuple(roster.departed.values()) if request.departed else ()
    # The job counts as finished once its last parameters are saved and hashed.
    saving = core.state.phase is m.Phase.FINISHED and not conductor.parameters_sha256
    return m.StatusResponse(
        job=job_message(job),
        phase=m.Phase.FINISHING if saving else core.state.phase,
        waiting=core.waiting(now).text + conductor.uploaded,
        version=core.state.version,
        epoch=core.state.epoch,
        epoch_progress=core.state.epoch_progress,
        members=tuple(_member(conductor, each, now) for each in roster.by_rank()),
        departed=tuple(_member(conductor, each, now) for each in departed),
        lost=tuple(core.state.lost),
        evaluations=tuple(core.state.evaluations.done),
        traffic=metrics.traffic(),
        pushes=metrics.accepted,
        refused_pushes=metrics.refused,
        train_loss=metrics.train_loss,
        training_seconds=conductor.training_seconds,
        parameters_sha256=conductor.parameters_sha256,
        software=__version__,
        repeated_samples=core.state.repeated_samples,
        measured=_measured(conductor) if request.measured else None,
        step_seconds=metrics.step_seconds,
        predicted_step_seconds=conductor.plans.predicted_s,
        learning_rate=core.learning_rate,
        losses=metrics.loss_history.messages() if request.losses else (),
        unix_seconds=time.time(),
        padding=request.padding if request.echo else b"",  # never more than was received
        **core.mode.status,
    )


def _member(conductor: Conductor, member: Member, now: float) -> m.MemberStatus:
    """Return the state of a present or departed member."""
    return m.MemberStatus(
        worker=member.worker,
        rank=member.rank,
        attached=member.attached,
        heard_seconds=max(0.0, now - member.heard_at),
        activity=member.activity,
        compressor=compressor_in(conductor.shard.reported.manifest, member.compressor),
        pushes=member.pushes,
        stalled_seconds=member.stalled_s,
        suspended=member.suspended,
    )


def _measured(conductor: Conductor) -> m.Measured | None:
    """Return the measurements of workers and link; None before there are any."""
    measured, manifest = conductor.plans.measured(), conductor.shard.reported.manifest
    state = conductor.core.state
    members, rules = state.roster.by_rank(), state.rules
    if measured is None or manifest is None or not members:
        return None
    return m.Measured(
        tensors=manifest.tensors,
        forward_seconds=tuple(layer.forward_s for layer in measured.layers),
        backward_seconds=tuple(layer.backward_s for layer in measured.layers),
        part_seconds=measured.link.start_s,
        byte_seconds=measured.link.byte_s,
        compressor=compressor_in(manifest, members[0].compressor),
        fusion=rules.fusion,
        order=rules.order,
        part_bytes=rules.part_bytes,
        cores=measured.cores or 0,
        processor_share=measured.processor_share,
        square_norms=measured.square_norms,
    )
