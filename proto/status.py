"""The gRPC status under which a refusal travels when a call is aborted with it."""

from __future__ import annotations

import grpc

from .messages import Reason

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
