"""Refusals of the state machine: the worker, field, limit, value and remedy of each."""

from __future__ import annotations

from itertools import zip_longest

from ...common.naming import shown
from ...proto.messages import Assignment
from ...proto.refusal import Reason, Refusal, refusal


def brief(why: Refusal) -> str:
    """Return a text of a few words for the refusal `why`: its field, value and limit."""
    return f"refused: {why.field}: {why.value}, expected {why.limit}"


def too_many(worker: str, most: int) -> Refusal:
    """Return the refusal of a worker that joins a job which has `most` members already."""
    return refusal(
        Reason.SIZE,
        worker=worker,
        field="membership",
        limit=f"a job of at most {most} members",
        value="one more",
        remedy="stop processes that join again and again under new names; --token-file limits access",
    )


def fenced(worker: str, incarnation: int, newest: int) -> Refusal:
    """Return the refusal of a worker whose incarnation is not the newest one of its worker id."""
    return refusal(
        Reason.FENCED,
        worker=worker,
        field="incarnation",
        # Incarnations are not named: with the number of the newest, a stranger could take over its stream.
        limit="the newest of this worker id",
        value="an older one" if incarnation < newest else "another one",
        remedy="another process has taken this worker id: stop one of them; if there is none, set this "
        "machine's clock, which is behind",
    )


def duplicate_worker(worker: str, heard_s: float) -> Refusal:
    """Return the refusal of a second live process with one worker id."""
    return refusal(
        Reason.DUPLICATE_WORKER,
        worker=worker,
        field="worker id",
        limit="one live process per worker id",
        value=f"a second one; the first was heard {heard_s:.1f} s ago",
        remedy="give each worker its own --worker-id, or stop the other process",
    )


def stalled(worker: str, seq: int, part: int, limit_s: float) -> Refusal:
    """Return the refusal of a part whose chunks have stopped arriving."""
    return refusal(
        Reason.CHUNK,
        worker=worker,
        field=f"push {seq}, part {part}",
        limit=f"the rest of it, a chunk at least every {limit_s:g} s",
        value="none",
        remedy="open another stream and send the part again",
    )


def not_a_member(worker: str) -> Refusal:
    """Return the refusal of a worker that has not joined the job."""
    return refusal(
        Reason.NOT_A_MEMBER,
        worker=worker,
        field="membership",
        limit="a worker that has joined",
        value="none of this id",
        remedy="join first",
    )


def lease_over(worker: str, silent_s: float, lease_s: float) -> Refusal:
    """Return the refusal of a member whose lease has expired."""
    return refusal(
        Reason.NOT_A_MEMBER,
        worker=worker,
        field="lease",
        limit=f"a message every {lease_s:g} s",
        value=f"none for {silent_s:.1f} s",
        remedy="reconnect",
    )


def no_progress(worker: str, activity: str, stalled_s: float, limit_s: float) -> Refusal:
    """Return the refusal of a member that is suspended, because its training thread hangs."""
    return refusal(
        Reason.NOT_A_MEMBER,
        worker=worker,
        field="progress",
        limit=f"{limit_s:.0f} s without progress of the training thread",
        value=f"{stalled_s:.0f} s" + (f" ({activity})" if activity else ""),
        remedy="none needed if the training thread continues: the worker then takes part again; if its steps "
        "take that long, start gc-server with a larger --progress-seconds",
    )


def wrong_model(
    worker: str, fingerprint: bytes, expected: bytes, difference: tuple[str, str] = ("", "")
) -> Refusal:
    """Return the refusal of a worker whose model differs from the job's."""
    limit, value = difference
    return refusal(
        Reason.MODEL,
        worker=worker,
        field="model" if limit else "model fingerprint",
        limit=limit or expected.hex()[:16],
        value=value or fingerprint.hex()[:16] or "none",
        remedy="run the same task, options and code on every worker",
    )


def accumulation(worker: str, batches: int, other: str, expected: int) -> Refusal:
    """Return the refusal of a worker that accumulates another number of batches than the job's others."""
    return refusal(
        Reason.MODEL,
        worker=worker,
        field="accumulate",
        limit=f"{expected}, as worker {shown(other)} has declared",
        value=str(batches),
        remedy="pass the same accumulate= to job.batches or job.steps on every worker",
    )


def not_extended(worker: str) -> Refusal:
    """Return the refusal of a request for further batches in a mode whose work cannot be extended."""
    return refusal(
        Reason.MALFORMED,
        worker=worker,
        field="more",
        limit="no such message, because members compute the blocks of an exchange",
        value="a request for further batches",
    )


def undeclared_accumulation(worker: str, took: int, given: int, why: str) -> Refusal:
    """Return the refusal of an optimizer step of another number of batches than the round was divided for."""
    return refusal(
        Reason.SIZE,
        worker=worker,
        field="batches of an optimizer step",
        limit=f"{given}, because {why} divides a round's samples before it begins",
        value=f"{took}",
        remedy="declare the number of batches: job.batches(dataset, accumulate=N), or job.steps(loader, "
        "accumulate=N), and call optimizer.step() after as many",
    )


def wrong_data(worker: str, data: int, expected: int) -> Refusal:
    """Return the refusal of a worker whose training data differ from the job's."""
    return refusal(
        Reason.MODEL,
        worker=worker,
        field="checksum of training samples",
        limit=f"{expected:08x}",
        value=f"{data:08x}",
        remedy="give every worker the same data set in the same order: the job divides it by index",
    )


def wrong_epoch(worker: str, samples: int, expected: int, batch_size: int, other: str | None) -> Refusal:
    """Return the refusal of a worker whose epochs are longer or shorter than the job's, those of `other`."""

    def counted(samples: int) -> str:
        return f"{samples} samples ({-(-samples // batch_size)} batches of {batch_size})"

    return refusal(
        Reason.MODEL,
        worker=worker,
        field="epoch",
        limit=counted(expected) + (f", as worker {shown(other)} has" if other else ""),
        value=counted(samples),
        remedy="give every worker the same data set, and its loader the same batch size; if their loaders "
        "have different lengths, pass the same number to job.steps(loader, per_epoch=)",
    )


def not_the_initializer(worker: str, initializer: str | None) -> Refusal:
    """Return the refusal of initial parameters from a worker that was not asked for them."""
    return refusal(
        Reason.NOT_A_MEMBER,
        worker=worker,
        field="initial parameters",
        limit=f"those of {initializer!r}" if initializer else "those of a worker that has joined",
        value=f"those of {worker!r}",
        remedy="report ready instead; the server asks for the parameters if it needs them",
    )


def already_initialized(worker: str) -> Refusal:
    """Return the refusal of initial parameters for a job that has them."""
    text = f"worker {worker!r}: the job already has its initial parameters"
    return Refusal(reason=Reason.ALREADY_INITIALIZED, worker=worker, message=text)


def sequence(worker: str, seq: int, expected: int) -> Refusal:
    """Return the refusal of a push whose seq is too small: its outcome is no longer remembered."""
    return refusal(
        Reason.SEQUENCE,
        worker=worker,
        field="push seq",
        limit=str(expected),
        value=str(seq),
        remedy="a push was lost in transit, or this one is older than the outcomes that the server remembers",
    )


def stale(worker: str, seq: int, assignment: int, version: int) -> Refusal:
    """Return the refusal of a push that can no longer become part of a version. The worker keeps the
    gradient.
    """
    return refusal(
        Reason.STALE,
        worker=worker,
        field=f"push {seq}",
        limit=f"one push for the worker's last assignment, while it can be part of version {version + 1}",
        value=f"for assignment {assignment}",
        remedy="none needed: the worker's next push carries the gradient",
    )


def plan(worker: str, seq: int, given: int, expected: int) -> Refusal:
    """Return the refusal of a push whose parts belong to another plan than the one in force."""
    return refusal(
        Reason.PLAN,
        worker=worker,
        field=f"push {seq} plan",
        limit=str(expected),
        value=str(given),
        remedy="divide the model by the last plan that arrived before the assignment",
    )


def learning_rates(
    worker: str, seq: int, given: tuple[float, ...], other: str, expected: tuple[float, ...]
) -> Refusal:
    """Return the refusal of a push whose learning rates differ from those of another push of the round."""
    pairs = enumerate(zip_longest(given, expected))
    group, (got, first) = next((number, pair) for number, pair in pairs if pair[0] != pair[1])
    of_job = "that of the job"
    return refusal(
        Reason.GROUP,
        worker=worker,
        field=f"push {seq} learning rate of parameter group {group}",
        limit=f"{of_job if first is None else repr(first)}, as worker {other!r} has it in this round",
        value=of_job if got is None else repr(got),
        remedy="give every worker's optimizer the same rates: step the same scheduler once for each step, "
        "and pass it to job.follow, so that a worker that joins late or returns has the state of the other "
        "workers. A schedule over job.total_steps changes with the number of workers; one over job.progress "
        "does not",
    )


def rates_of_workers(worker: str, seq: int) -> Refusal:
    """Return the refusal of a push that carries learning rates in a job where workers may not choose them."""
    return refusal(
        Reason.GROUP,
        worker=worker,
        field=f"push {seq} learning_rates",
        limit="none in local mode, where workers take the steps, and without --script",
        value="some",
        remedy="leave the rate to the job's --learning-rate and --schedule, or start gc-server --script",
    )


def redundant(worker: str, seq: int, assignment: int, version: int) -> Refusal:
    """Return the refusal of a push whose gradient other members push. The worker forgets the gradient."""
    return refusal(
        Reason.REDUNDANT,
        worker=worker,
        field=f"push {seq}",
        limit=f"a push that version {version + 1} can still use",
        value=f"one for assignment {assignment}, whose samples other workers have pushed or are pushing",
        remedy="none needed: no part of it is to be sent again",
    )


def given_up(worker: str, seq: int) -> Refusal:
    """Return the refusal of push `seq`, whose parts were dropped although it would now be accepted.

    The parts were dropped because the push would have been refused at that time. The worker sends the push
    again.
    """
    return refusal(
        Reason.CHUNK,
        worker=worker,
        field=f"push {seq}",
        limit="all of its parts",
        value="none: they were dropped while the worker's assignment was revoked",
        remedy="none needed: the push is sent again",
    )


def parts(worker: str, seq: int, given: int, expected: int, assignment: Assignment) -> Refusal:
    """Return the refusal of a push with a wrong number of parts."""
    of = (
        f"slice {assignment.slice} of {assignment.slices}, or all of them"
        if assignment.slices
        else "those of its assignment"
    )
    return Refusal(
        reason=Reason.TENSOR,
        worker=worker,
        field=f"push {seq} parts",
        limit=f"{expected} ({of})",
        value=str(given),
        message=f"worker {worker!r}: push {seq} has {given} parts, expected {expected} ({of})",
        remedy="push the parts that the assignment names",
    )


def base_version(worker: str, seq: int, given: int, expected: int) -> Refusal:
    """Return the refusal of a push that was computed at another version than its assignment names."""
    return refusal(
        Reason.MALFORMED,
        worker=worker,
        field=f"push {seq} base_version",
        limit=f"{expected}, that of its assignment",
        value=str(given),
        remedy="compute at the version that the assignment names",
    )


def samples(worker: str, seq: int, given: int, most: int) -> Refusal:
    """Return the refusal of a push that claims more samples than its assignment has."""
    return refusal(
        Reason.MALFORMED,
        worker=worker,
        field=f"push {seq} samples",
        limit=f"at most {most}, the worker's share of the round",
        value=str(given),
        remedy="count only the samples of the assignment; they are the push's weight in the mean",
    )


def not_initialized(worker: str, name: str) -> Refusal:
    """Return the refusal of a message that arrives before the job has its initial parameters."""
    text = f"worker {worker!r}: {name} arrived before the initial parameters of the job"
    return Refusal(reason=Reason.NOT_INITIALIZED, worker=worker, message=text)


def packet(worker: str, limit: str, value: str) -> Refusal:
    """Return the refusal of a coded packet that breaks the rules of its exchange."""
    return refusal(
        Reason.PACKET,
        worker=worker,
        field="packet",
        limit=limit,
        value=value,
        remedy="run the same release on server and workers",
    )


def not_of_mode(worker: str, seq: int, *, coded: bool) -> Refusal:
    """Return the refusal of a push of the wrong kind for the job's mode.

    Args:
        coded: True if the job is in coded mode, where pushes report an exchange; False where they carry
            tensors.
    """
    report, tensors = "a report of the exchange", "tensors"
    limit, value = (f"{report}, in coded mode", tensors) if coded else (tensors, report)
    return refusal(Reason.PACKET, worker=worker, field=f"push {seq}", limit=limit, value=value)


def lossy_compressor(worker: str, compressor: str) -> Refusal:
    """Return the refusal of a worker with a lossy compressor in a job with a straggler code."""
    return refusal(
        Reason.PAYLOAD,
        worker=worker,
        field="compressor",
        limit="one without loss, because this job's straggler code multiplies the loss",
        value=compressor,
        remedy="start the worker with --compressor none, or the server without stragglers=",
    )


def other_bases(worker: str, compressor: str, jobs: str) -> Refusal:
    """Return the refusal of a worker with another compressor than the job's, where one of them has bases."""
    return refusal(
        Reason.PAYLOAD,
        worker=worker,
        field="compressor",
        limit=f"{jobs}, the job's, because one of them has bases that all workers share",
        value=compressor,
        remedy="start the worker without --compressor, or the server with this one",
    )


def not_coded(worker: str) -> Refusal:
    """Return the refusal of a packet or snapshot in a job that is not in coded mode."""
    return refusal(
        Reason.PACKET, worker=worker, field="mode", limit="coded for packets and snapshots", value="another"
    )


def finished(worker: str, how: str) -> Refusal:
    """Return the refusal of a message to a finished job."""
    text = f"the job has finished: {how}"
    return Refusal(reason=Reason.JOB_FINISHED, worker=worker, message=text)


def stopping(worker: str, reason: str) -> Refusal:
    """Return the refusal of a message while the server shuts down."""
    text = f"the server is shutting down: {reason}"
    remedy = "start gc-server again, then this worker; with --state the server continues its job"
    return Refusal(reason=Reason.STOPPING, worker=worker, message=text, remedy=remedy)
