"""A connection that hands out messages and notes what is done with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from gradwire.common.parts import Plan
from gradwire.compressors import DenseFormat, DensePayload, Payload
from gradwire.proto import messages as m
from gradwire.proto.job import job_message
from gradwire.proto.transfer import digest, payload_header
from gradwire.proto.wire import crc32c
from gradwire.settings import JobTerms
from gradwire.worker.session.progress import Progress
from gradwire.worker.session.receiving import Received
from gradwire.worker.session.replica import Replica

JOB = job_message(JobTerms(id="j", work="gradients", batch_size=4, epochs=9))
LIMITS = m.Limits(chunk_bytes=1 << 20, lease_seconds=10, heartbeat_seconds=2)
REPLY = m.JoinResponse(job=JOB, limits=LIMITS, rank=0, version=0, initialize=True)


class Script:
    """Stands in for a `Connection`. A message that can be called is made when its turn comes.

    Attributes:
        parts: by seq and number, header and payloads.
        pushed: commits, each with the payloads of its parts in flat order.
        resent: seq and part of what was asked for.
        saved_at: versions of which a worker has written down its state, with what went wrong.
        plan: that parts are of: the last that was handed out, if not set.
        ended: why the worker has left.
        failed: whether it said that it has failed.
        away_s: how long there has been no stream.
    """

    def __init__(self, *messages: Any) -> None:
        self.messages = list(messages)
        self.activity = ""
        self.progress = Progress()
        self.reconnects = 0
        self.parts: dict[tuple[int, int], tuple[m.PartHeader, list[Payload]]] = {}
        self.pushed: list[tuple[m.Commit, list[Payload]]] = []
        self.abandoned: list[int] = []
        self.asked: list[m.More] = []
        self.reports: list[m.Evaluation] = []
        self.settled: list[int] = []
        self.resent: list[tuple[int, int | None]] = []
        self.at: list[int] = []
        self.hurries = 0
        self.saved_at: list[tuple[int, str]] = []
        self.plan: Plan | None = None
        self.rank = 0
        self.ended = ""
        self.failed = False
        self.away_s = 0.0

    def initialize(
        self, manifest: Any, values: Any, state: Any = None, least: int = 1, earlier: Any = None
    ) -> bool:
        return True

    def get_state(self, manifest: Any, epoch: int, frozen: bytes) -> dict[str, Any]:
        return {}  # the job's buffers are this worker's own

    def ready(self, manifest: Any, *, restored: bool = False, accumulate: int = 0) -> None:
        pass

    def moved(self) -> None:
        pass

    def next(self, timeout_s: float) -> Any:
        assert self.messages, "the worker waits for what never comes"
        message = self.messages.pop(0)
        message = message() if callable(message) else message
        if isinstance(message, Plan):
            self.plan = message
        return message

    def queue_part(self, header: m.PartHeader, payloads: Sequence[Payload]) -> int:
        assert (header.seq, header.part) not in self.parts
        self.parts[header.seq, header.part] = header, list(payloads)
        return crc32c(each.data for each in payloads)

    def queue_commit(self, commit: m.Commit) -> None:
        parts = {part: payloads for (seq, part), (_, payloads) in self.parts.items() if seq == commit.seq}
        checksums = {part: crc32c(each.data for each in payloads) for part, payloads in parts.items()}
        assert (commit.parts, commit.digest) == (len(parts), digest(checksums))
        # Parts come in backward order, those of one tensor from its beginning.
        bounds = self.plan.parts if self.plan is not None else ()
        in_order = sorted(parts, key=lambda part: bounds[part].start if bounds else -part)
        self.pushed.append((commit, [payload for part in in_order for payload in parts[part]]))

    def abandon(self, seq: int) -> None:
        self.abandoned.append(seq)

    def repeat(self, message: m.Evaluation | m.More) -> None:
        if isinstance(message, m.More):
            self.ask(message)
        else:
            self.reports.append(message)

    def ask(self, request: m.More) -> None:
        self.asked.append(request)

    def profile(self, profile: m.Profile) -> None:
        pass

    def hurry(self) -> None:
        self.hurries += 1

    def settle(self, seq: int) -> None:
        self.settled.append(seq)

    def resend(self, seq: int, part: int | None) -> None:
        self.resent.append((seq, part))

    def saved(self, version: int, error: str) -> None:
        self.saved_at.append((version, error))

    def stepped(self, version: int) -> None:
        self.at.append(version)

    def leave(self, reason: str, *, failed: bool) -> None:
        self.ended, self.failed = reason, failed

    def close(self) -> None:
        pass

    @property
    def sent(self) -> tuple[int, float]:
        return 0, 0.0


def updates(
    replica: Replica,
    version: int,
    values: Sequence[np.ndarray[Any, Any]] | None = None,
    of: Plan | None = None,
    **changes: Any,
) -> list[Received]:
    """All parts of a whole update. values: of each tensor, the present ones if not given. of: the plan that
    there is by then, if another than now."""
    flat = np.concatenate([value.view(np.float32).copy() for value in values or replica.values()])
    found: list[Received] = []
    for number, part in enumerate((of or replica.plan).parts):
        data = flat[part.start : part.end].view(np.uint8)
        payload = DensePayload(format=DenseFormat.FLOAT32, elements=part.elements, data=data)
        header = payload_header(payload, m.Content.VALUES)
        update = m.Update(version=version, part=number, plan=1, whole=True, payloads=(header,))
        found.append(Received(dataclasses.replace(update, **changes), [payload]))
    return found
