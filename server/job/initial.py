"""The job's model: which member uploads its initial parameters, and whether the others have the same model.

The first member to join is asked. If it is lost before the upload is complete, the next member that is ready
is asked. A member that was ready before is compared once the job has a model, every other one when it becomes
ready.
"""

from __future__ import annotations

from dataclasses import replace

from ...proto.messages import Phase
from ...proto.refusal import Refusal, Refused
from . import events as e
from . import limits, refusals
from .roster import Member
from .samples import Samples
from .state import JobState


def check_uploader(state: JobState, worker: str, incarnation: int) -> Refusal | None:
    """Return the refusal if this worker may not upload the initial parameters now; None if it may."""
    if state.phase is not Phase.EMPTY:
        return refusals.already_initialized(worker)
    if state.initializer != (worker, incarnation):
        return refusals.not_the_initializer(worker, state.initializer[0] if state.initializer else None)
    return None


def request(state: JobState, member: Member) -> list[e.Action]:
    """Ask a member for the initial parameters."""
    state.initializer = member.id
    return [e.RequestInitialize(worker=member.worker)]


def begin(state: JobState, event: e.Initialized, now: float) -> list[tuple[Member, Refusal]]:
    """Begin the job with the model of `event`.

    Returns:
        Members that became ready before and have another model, each with its refusal.
    """
    state.phase = Phase.GATHERING
    state.fingerprint, state.data = event.fingerprint, event.data
    if event.epochs:
        state.rules = replace(state.rules, epochs=event.epochs)
    state.samples = Samples.beginning(
        event.train_samples, limits.epochs(state.rules), event.least, event.epoch
    )
    state.earlier_steps = event.steps
    state.evaluations.begun = state.evaluations_passed  # the script has made the earlier evaluations
    how = state.rules.buffers
    state.buffers.wanted = event.buffers and how != "local"
    state.buffers.first_alone = how == "rank0"
    state.wait_from(now)
    others: list[tuple[Member, Refusal]] = []
    for member in state.roster.ready():
        try:
            check_model(state, member.worker, member, event.differences.get(member.worker, ("", "")))
        except Refused as refused:
            others.append((member, refused.refusal))
    return others


def check_model(state: JobState, worker: str, own: e.Prepared | Member, difference: tuple[str, str]) -> None:
    """Compare a worker's model and data with the job's.

    Args:
        own: fingerprint, checksum of samples and number of samples of the worker.
        difference: first difference of the models, in the job's and in the worker's; empty if unknown.

    Raises:
        Refused: they differ.
    """
    if own.fingerprint != state.fingerprint:
        raise Refused(refusals.wrong_model(worker, own.fingerprint, state.fingerprint, difference))
    per_epoch = state.samples.per_epoch
    if own.train_samples and own.train_samples != per_epoch:
        other = state.initializer[0] if state.initializer else None
        size = state.rules.batch_size
        raise Refused(refusals.wrong_epoch(worker, own.train_samples, per_epoch, size, other))
    if own.data and state.data and own.data != state.data:
        raise Refused(refusals.wrong_data(worker, own.data, state.data))
