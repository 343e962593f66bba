"""A connection that hands out messages and notes what is done with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradwire.compressors import Payload
from gradwire.proto import messages as m
from gradwire.proto.job import job_message
from gradwire.settings import JobTerms

JOB = job_message(JobTerms(id="j", work="gradients", batch_size=4, epochs=9))
LIMITS = m.Limits(chunk_bytes=1 << 20, lease_seconds=10, heartbeat_seconds=2)
REPLY = m.JoinResponse(job=JOB, limits=LIMITS, rank=0, version=0, initialize=True)


class Script:
    """Stands in for a `Connection`. A message that can be called is made when its turn comes."""

    def __init__(self, *messages: Any) -> None:
        self.messages = list(messages)
        self.activity = ""
        self.reconnects = 0
        self.pushed: list[tuple[m.Push, list[Payload]]] = []
        self.reports: list[m.Evaluation] = []
        self.settled: list[int] = []
        self.resends = 0

    def initialize(self, manifest: Any, values: Any) -> bool:
        return True

    def ready(self, manifest: Any) -> None: ...

    def next(self, timeout_s: float) -> Any:
        message = self.messages.pop(0)
        return message() if callable(message) else message

    def push(self, header: m.Push, payloads: Sequence[Payload]) -> None:
        self.pushed.append((header, list(payloads)))

    def report(self, evaluation: m.Evaluation) -> None:
        self.reports.append(evaluation)

    def settle(self, seq: int) -> None:
        self.settled.append(seq)

    def resend(self) -> None:
        self.resends += 1
