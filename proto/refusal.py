"""Typed refusals: plain data that tell a worker or an operator why something was not accepted.

A refusal is a `messages.Refusal`. The exception `Refused` carries it through Python code, and ends a call
with a typed gRPC status and the whole refusal in the trailing metadata. The status is never UNAVAILABLE,
because a worker retries a call that ends with it.
"""

from __future__ import annotations

from .messages import Reason as Reason
from .messages import Refusal as Refusal


def sentence(refusal: Refusal) -> str:
    """Return a refusal as text for people: its message, reason and remedy."""
    return f"{refusal.message} ({refusal.reason.label})" + (f"; {refusal.remedy}" if refusal.remedy else "")


def refusal(
    reason: Reason, *, worker: str = "", field: str = "", limit: str = "", value: str = "", remedy: str = ""
) -> Refusal:
    """Return a refusal whose message is composed of its fields: "worker, field: expected limit, got value".

    Args:
        worker: id of the refused worker; empty if unknown.
        field: name of the refused field or tensor; empty for none.
        limit: description of the values that would have been accepted; empty for none.
        value: value that was received, or without a limit, the description of the fault.
        remedy: action that mends it; empty for none.
    """
    subject = ", ".join(part for part in (f"worker {worker!r}" if worker else "", field) if part)
    message = f"{subject or reason.label}: expected {limit}, got {value}" if limit else f"{subject}: {value}"
    return Refusal(
        reason=reason, message=message, worker=worker, field=field, limit=limit, value=value, remedy=remedy
    )


class Refused(Exception):
    """Exception that carries a refusal to the end of the call or stream.

    Attributes:
        refusal: the refusal as data.

    Example:
        >>> try:  # after the last epoch
        ...     gradwire.connect()
        ... except gradwire.Refused as error:
        ...     print(error.refusal.reason.name)
        JOB_FINISHED
    """

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(sentence(refusal))
        self.refusal = refusal


def refused(reason: Reason, **pieces: str) -> Refused:
    """Return the exception `Refused` for a refusal with this reason.

    Args:
        pieces: fields of the refusal, as in `refusal`: worker, field, limit, value and remedy.
    """
    return Refused(refusal(reason, **pieces))
