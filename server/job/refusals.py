"""Refusals of the state machine: worker, field, limit, value and remedy of each."""

from __future__ import annotations

from itertools import zip_longest

from ...proto.messages import Assignment
from ...proto.refusal import Reason, Refusal, refusal


def brief(why: Refusal) -> str:
    """Return a refusal in few words, for the log and for waiting workers."""
    return f"refused: {why.field}: {why.value}, expected {why.limit}"


def too_many(worker: str, most: int) -> Refusal:
    return refusal(
        Reason.SIZE,
        worker=worker,
        field="membership",
        limit=f"a job of at most {most} members",
        value="one more",
        remedy="is somebody joining again and again under other names? --token-file says who may",
    )


def fenced(worker: str, incarnation: int, newest: int) -> Refusal:
    return refusal(
        Reason.FENCED,
        worker=worker,
        field="incarnation",
        # Not which: by its number a stranger could take the stream of the newest.
        limit="the newest of this worker id",
        value="an older one" if incarnation < newest else "another one",
        remedy="another process has taken this worker id; if none has, this machine's clock is behind",
    )


def duplicate_worker(worker: str, heard_s: float) -> Refusal:
    return refusal(
        Reason.DUPLICATE_WORKER,
        worker=worker,
        field="worker id",
        limit="one live process per worker id",
        value=f"a second one; the first was heard {heard_s:.1f} s ago",
        remedy="give each worker its own --worker-id, or stop the other process",
    )


def stalled(worker: str, seq: int, part: int, limit_s: float) -> Refusal:
    return refusal(
        Reason.CHUNK,
        worker=worker,
        field=f"push {seq}, part {part}",
        limit=f"the rest of it, a chunk at least every {limit_s:g} s",
        value="none",
        remedy="open another stream and send the part again",
    )


def not_a_member(worker: str) -> Refusal:
    return refusal(
        Reason.NOT_A_MEMBER,
        worker=worker,
        field="membership",
        limit="a worker that has joined",
        value="none of this id",
        remedy="join first",
    )


def lease_over(worker: str, silent_s: float, lease_s: float) -> Refusal:
    return refusal(
        Reason.NOT_A_MEMBER,
        worker=worker,
        field="lease",
        limit=f"a message every {lease_s:g} s",
        value=f"none for {silent_s:.1f} s",
        remedy="reconnect",
    )


def no_progress(worker: str, activity: str, stalled_s: float, limit_s: float) -> Refusal:
    return refusal(
        Reason.NOT_A_MEMBER,
        worker=worker,
        field="progress",
        limit=f"{limit_s:.0f} s without progress of the training thread",
        value=f"{stalled_s:.0f} s" + (f" ({activity})" if activity else ""),
        remedy="the worker takes part again when its training thread goes on; if it does not hang but takes "
        "that long, start gc-server with a larger --progress-seconds",
    )


def wrong_model(worker: str, fingerprint: bytes, expected: bytes) -> Refusal:
    return refusal(
        Reason.MODEL,
        worker=worker,
        field="model fingerprint",
        limit=expected.hex()[:16],
        value=fingerprint.hex()[:16] or "none",
        remedy="run the same task, options and code on every worker",
    )


def wrong_data(worker: str, data: int, expected: int) -> Refusal:
    return refusal(
        Reason.MODEL,
        worker=worker,
        field="training samples",
        limit=f"some of them with the checksum {expected:08x}",
        value=f"{data:08x}",
        remedy="give every worker the same data set in the same order: the job divides it by index",
    )


def wrong_epoch(worker: str, samples: int, expected: int, batch_size: int) -> Refusal:
    def counted(samples: int) -> str:
        return f"{samples} samples ({-(-samples // batch_size)} batches of {batch_size})"

    return refusal(
        Reason.MODEL,
        worker=worker,
        field="epoch",
        limit=counted(expected),
        value=counted(samples),
        remedy="all workers have epochs of one length: give each the same data set, or where their loaders "
        "have different lengths, the same number to job.steps(loader, per_epoch=)",
    )


def not_the_initializer(worker: str, initializer: str | None) -> Refusal:
    return refusal(
        Reason.NOT_A_MEMBER,
        worker=worker,
        field="initial parameters",
        limit=f"those of {initializer!r}" if initializer else "those of a worker that has joined",
        value=f"those of {worker!r}",
        remedy="get ready instead; the server asks for them if it needs them",
    )


def already_initialized(worker: str) -> Refusal:
    text = f"worker {worker!r}: the job already has its initial parameters"
    return Refusal(reason=Reason.ALREADY_INITIALIZED, worker=worker, message=text)


def sequence(worker: str, seq: int, expected: int) -> Refusal:
    return refusal(
        Reason.SEQUENCE,
        worker=worker,
        field="push seq",
        limit=str(expected),
        value=str(seq),
        remedy="a push was lost on the way, or this one is older than the server remembers",
    )


def stale(worker: str, seq: int, assignment: int, version: int) -> Refusal:
    return refusal(
        Reason.STALE,
        worker=worker,
        field=f"push {seq}",
        limit=f"one push for what the worker was last given, while it can be part of version {version + 1}",
        value=f"for assignment {assignment}",
        remedy="none needed: the gradient goes out with the worker's next push",
    )


def plan(worker: str, seq: int, given: int, expected: int) -> Refusal:
    return refusal(
        Reason.PLAN,
        worker=worker,
        field=f"push {seq} plan",
        limit=str(expected),
        value=str(given),
        remedy="divide the model as the last plan that came before the assignment says",
    )


def learning_rates(
    worker: str, seq: int, given: tuple[float, ...], other: str, expected: tuple[float, ...]
) -> Refusal:
    """given, expected: by parameter group, or none. other: the worker that was the first to say them."""
    pairs = enumerate(zip_longest(given, expected))
    group, (got, said) = next((number, pair) for number, pair in pairs if pair[0] != pair[1])
    of_job = "that of the job"
    return refusal(
        Reason.GROUP,
        worker=worker,
        field=f"push {seq} learning rate of parameter group {group}",
        limit=f"{of_job if said is None else repr(said)}, as worker {other!r} has it in this round",
        value=of_job if got is None else repr(got),
        remedy="give every worker's optimizer the same rates: step the same scheduler once for each step, "
        "and name it to job.follow: a worker that joins late or comes back then has it where the others are. "
        "A schedule made for job.total_steps is another one where the number of workers has changed; "
        "made for job.progress it is the same",
    )


def rates_of_workers(worker: str, seq: int) -> Refusal:
    return refusal(
        Reason.GROUP,
        worker=worker,
        field=f"push {seq} learning_rates",
        limit="none in local mode, where workers take the steps, and without --script",
        value="some",
        remedy="leave the rate to the job's --learning-rate and --schedule, or start gc-server --script",
    )


def redundant(worker: str, seq: int, assignment: int, version: int) -> Refusal:
    return refusal(
        Reason.REDUNDANT,
        worker=worker,
        field=f"push {seq}",
        limit=f"a push that version {version + 1} can still do with",
        value=f"one for assignment {assignment}, whose samples others have pushed or are pushing",
        remedy="none needed: nothing of it is to be sent again",
    )


def given_up(worker: str, seq: int) -> Refusal:
    """For a push whose parts were dropped because it would have been refused, and now it would not."""
    return refusal(
        Reason.CHUNK,
        worker=worker,
        field=f"push {seq}",
        limit="all of its parts",
        value="none: they were dropped while the worker's work was not its own",
        remedy="none needed: the push is sent again",
    )


def parts(worker: str, seq: int, given: int, expected: int, assignment: Assignment) -> Refusal:
    """given: how many parts there are of a push. expected: how many its assignment asks for."""
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
    return refusal(
        Reason.MALFORMED,
        worker=worker,
        field=f"push {seq} base_version",
        limit=f"{expected}, that of its assignment",
        value=str(given),
        remedy="compute at the version that the assignment names",
    )


def samples(worker: str, seq: int, given: int, most: int) -> Refusal:
    return refusal(
        Reason.MALFORMED,
        worker=worker,
        field=f"push {seq} samples",
        limit=f"at most {most}, the worker's share of the round",
        value=str(given),
        remedy="count only the samples of the assignment; they are the push's weight in the mean",
    )


def not_initialized(worker: str, what: str) -> Refusal:
    text = f"worker {worker!r}: {what} came before the job has its initial parameters"
    return Refusal(reason=Reason.NOT_INITIALIZED, worker=worker, message=text)


def packet(worker: str, limit: str, value: str) -> Refusal:
    return refusal(
        Reason.PACKET,
        worker=worker,
        field="packet",
        limit=limit,
        value=value,
        remedy="both sides have to be of the same release",
    )


def not_of_mode(worker: str, seq: int, *, coded: bool) -> Refusal:
    what = ("what was exchanged, in coded mode", "tensors") if coded else ("tensors", "what was exchanged")
    return refusal(Reason.PACKET, worker=worker, field=f"push {seq}", limit=what[0], value=what[1])


def lossy_compressor(worker: str, compressor: str) -> Refusal:
    return refusal(
        Reason.PAYLOAD,
        worker=worker,
        field="compressor",
        limit="one without loss, because this job's straggler code multiplies what is lost",
        value=compressor,
        remedy="start the worker with --compressor none, or the server without stragglers=",
    )


def not_coded(worker: str) -> Refusal:
    return refusal(
        Reason.PACKET, worker=worker, field="mode", limit="coded for packets and snapshots", value="another"
    )


def finished(worker: str, how: str) -> Refusal:
    text = f"the job has finished: {how}"
    return Refusal(reason=Reason.JOB_FINISHED, worker=worker, message=text)


def stopping(worker: str, reason: str) -> Refusal:
    text = f"the server is shutting down: {reason}"
    return Refusal(reason=Reason.STOPPING, worker=worker, message=text)
