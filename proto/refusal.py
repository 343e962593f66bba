"""Typed refusals: what a worker or an operator is told when something is not accepted.

A refusal is plain data, `messages.Refusal`. `Refused` carries one through Python code; `status_code` says
which gRPC status it travels under when a call is aborted with it.
"""

from __future__ import annotations

import grpc

from .messages import Reason as Reason
from .messages import Refusal as Refusal


def sentence(refusal: Refusal) -> str:
    """All of a refusal that a person needs."""
    return f"{refusal.message} ({refusal.reason.label})" + (f"; {refusal.remedy}" if refusal.remedy else "")


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
        super().__init__(sentence(refusal))
        self.refusal = refusal


def refused(reason: Reason, **pieces: str) -> Refused:
    """To be raised: a refusal that is made of its pieces, as by `refusal`."""
    return Refused(refusal(reason, **pieces))


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
