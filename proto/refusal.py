"""Typed refusals: what a worker or an operator is told when something is not accepted.

A refusal is plain data. `Refused` carries one through Python code; `status_code` says which gRPC status it
travels under when a call is aborted with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import grpc


class Reason(IntEnum):
    """Why; the numbers are those of gradwire.v1.Reason, where each is explained."""

    UNSPECIFIED = 0
    MALFORMED = 1
    PROTOCOL_VERSION = 2
    UNKNOWN_JOB = 3
    JOB_FINISHED = 4
    MODEL = 5
    FENCED = 6
    DUPLICATE_WORKER = 7
    NOT_A_MEMBER = 8
    NOT_INITIALIZED = 9
    ALREADY_INITIALIZED = 10
    TENSOR = 11
    SHAPE = 12
    DTYPE = 13
    ELEMENTS = 14
    PAYLOAD = 15
    NON_FINITE = 16
    CHECKSUM = 17
    CHUNK = 18
    SIZE = 19
    SEQUENCE = 20
    STALE = 21
    PROTECTED = 22
    STOPPING = 23
    PACKET = 24
    REDUNDANT = 25

    @property
    def label(self) -> str:
        """Lower-case name, for messages and metric labels."""
        return self.name.lower()


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """One refusal. `message` is a whole sentence; the rest is the same in pieces."""

    reason: Reason
    message: str
    worker: str = ""
    field: str = ""
    limit: str = ""
    value: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.message} ({self.reason.label})" + (f"; {self.remedy}" if self.remedy else "")


def refusal(
    reason: Reason, *, worker: str = "", field: str = "", limit: str = "", value: str = "", remedy: str = ""
) -> Refusal:
    """A refusal whose sentence is made of its pieces."""
    subject = ", ".join(part for part in (f"worker {worker!r}" if worker else "", field) if part)
    message = f"{subject or reason.label}: expected {limit}, got {value}" if limit else f"{subject}: {value}"
    return Refusal(
        reason=reason, message=message, worker=worker, field=field, limit=limit, value=value, remedy=remedy
    )


class Refused(Exception):
    """Raised where something is not accepted."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


_INVALID = grpc.StatusCode.INVALID_ARGUMENT
_PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
_STATUS: dict[Reason, grpc.StatusCode] = {
    Reason.UNKNOWN_JOB: grpc.StatusCode.NOT_FOUND,
    Reason.JOB_FINISHED: _PRECONDITION,
    Reason.PROTOCOL_VERSION: _PRECONDITION,
    Reason.MODEL: _PRECONDITION,
    Reason.FENCED: grpc.StatusCode.ABORTED,
    Reason.DUPLICATE_WORKER: grpc.StatusCode.ALREADY_EXISTS,
    Reason.NOT_A_MEMBER: _PRECONDITION,
    Reason.NOT_INITIALIZED: _PRECONDITION,
    Reason.ALREADY_INITIALIZED: _PRECONDITION,
    Reason.CHECKSUM: grpc.StatusCode.DATA_LOSS,
    Reason.SIZE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.STALE: grpc.StatusCode.ABORTED,
    Reason.PROTECTED: grpc.StatusCode.PERMISSION_DENIED,
    Reason.STOPPING: _PRECONDITION,
}


def status_code(reason: Reason) -> grpc.StatusCode:
    """The gRPC status under which a call is aborted. Never UNAVAILABLE: a refusal is not worth a retry."""
    return _STATUS.get(reason, _INVALID)
