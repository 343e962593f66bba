"""Typed refusals: what a worker or an operator is told when something is not accepted.

A refusal is plain data, `messages.Refusal`. `Refused` carries one through Python code. It ends a call with a
typed status, never UNAVAILABLE, on which a worker tries again; the trailing metadata have all of it.
"""

from __future__ import annotations

from .messages import Reason as Reason
from .messages import Refusal as Refusal


def sentence(refusal: Refusal) -> str:
    """Return a refusal with its reason and remedy, for people."""
    return f"{refusal.message} ({refusal.reason.label})" + (f"; {refusal.remedy}" if refusal.remedy else "")


def refusal(
    reason: Reason, *, worker: str = "", field: str = "", limit: str = "", value: str = "", remedy: str = ""
) -> Refusal:
    """Return a refusal whose message is made of its fields."""
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
    """Return the exception of a refusal; arguments are those of `refusal`."""
    return Refused(refusal(reason, **pieces))
