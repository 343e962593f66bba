"""The page of a job at the HTTP port: `page.html`, and the JSON that it polls.

It shows the answer to Status, as gc-status does, and this server's figures of each member. Of the job's
options it has only those that it draws, because it can be read without a token, as /metrics can.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import math
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...common.telemetry import Answer
from ...proto import messages as m
from ...proto.status import fraction, json_values, printable_texts, to_json_dict
from ...settings import JobTerms
from ..conductor import Conductor
from ..job.roster import Member
from ..job.waiting import seconds_of
from .status import status_of

FRESH_S = 1.0  # an answer serves all requests for so long, however many pages are open
PATIENCE_S = 5.0  # longest wait for the event loop
DRAWN = ("task", "script", "mode", "epochs", "max_steps")

_HTML = Path(__file__).with_name("page.html").read_bytes()


def _allowed(tag: bytes) -> str:
    """Return the hash by which a Content-Security-Policy allows the page's own script or style."""
    (content,) = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), _HTML, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}'"


_HEADERS = (
    ("Cache-Control", "no-store"),
    (
        "Content-Security-Policy",
        f"default-src 'none'; script-src {_allowed(b'script')}; style-src {_allowed(b'style')}; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Referrer-Policy", "no-referrer"),
    ("X-Content-Type-Options", "nosniff"),
)


@dataclass(frozen=True, slots=True)
class Seen:
    """The state of a job at one moment, which no longer changes.

    Attributes:
        status: answer to Status.
        members: further figures of its members, in the same order.
        more: further figures of the job.
    """

    status: m.StatusResponse
    members: list[dict[str, Any]]
    more: dict[str, Any]

    def to_json(self) -> str:
        """Return the state as JSON; null for unknown values."""
        found = to_json_dict(printable_texts(self.status))
        del found["job"], found["measured"], found["parameters_sha256"]
        pairs = zip(found["members"], self.members, strict=True)
        found["members"] = [{**shown, **more} for shown, more in pairs]
        return json.dumps(found | json_values(self.more), allow_nan=False)


class Page:
    """Answers to HTTP requests for the page. Threads of the HTTP server call it; the state of the job is read
    on the event loop that runs when it is created."""

    def __init__(self, starting: Callable[[], str], look: Callable[[], Seen]) -> None:
        """
        Args:
            starting: returns why `look` must not be called yet; empty once it may.
            look: returns the state of the job; called on the event loop."""
        self._loop, self._starting, self._look = asyncio.get_running_loop(), starting, look
        self._lock = threading.Lock()
        self._answer, self._until = Answer("", "", b""), -math.inf  # the last answer, and the end of its use

    def html(self) -> Answer:
        """Return the page, which holds no data."""
        return Answer("200 OK", "text/html; charset=utf-8", _HTML, _HEADERS)

    def data(self) -> Answer:
        """Return the state of the job as JSON; 503 with the reason while it cannot be read."""
        with self._lock:
            if time.monotonic() >= self._until:
                self._answer, self._until = self._read(), time.monotonic() + FRESH_S
            return self._answer

    def _read(self) -> Answer:
        why = self._starting()
        if not why:
            asked: Future[Seen] = Future()
            try:
                self._loop.call_soon_threadsafe(self._see, asked)
                return Answer(
                    "200 OK", "application/json", asked.result(PATIENCE_S).to_json().encode(), _HEADERS
                )
            except TimeoutError:
                asked.cancel()
                why = f"the server is too busy to answer within {PATIENCE_S:g} s"
        return Answer("503 Service Unavailable", "text/plain; charset=utf-8", f"{why}\n".encode(), _HEADERS)

    def _see(self, asked: Future[Seen]) -> None:
        if asked.set_running_or_notify_cancel():
            try:
                asked.set_result(self._look())
            except Exception as error:
                asked.set_exception(error)


def look(conductor: Conductor, job: JobTerms) -> Seen:
    """Return the state of the job that `conductor` runs. Called on its event loop."""
    core, metrics, recorder, now = conductor.core, conductor.metrics, conductor.recorder, conductor.now()
    status, waiting = status_of(conductor, job, m.StatusRequest(losses=True)), core.waiting(now)
    members = [
        {**_of_member(conductor, each), "awaited": each.rank in waiting.ranks}
        for each in core.state.roster.by_rank()
    ]
    checkpoint = {
        "version": recorder.version,
        "unix_seconds": recorder.written_at,
        "failing": recorder.failing,
        "free_bytes": metrics.state_free_bytes.value,
    }
    more = {
        "id": job.id,
        "settings": {name: getattr(job, name) for name in DRAWN},
        "fraction": fraction(status),
        "waited_seconds": seconds_of(core.state, waiting, now),
        "min_workers": core.state.rules.min_workers,
        "parts": metrics.parts.value,
        "refusals": metrics.refusals(),
        "history": metrics.history.points.copy(),
        "checkpoint": checkpoint if recorder.keeps else None,
    }
    return Seen(status, members, more)


def _of_member(conductor: Conductor, member: Member) -> dict[str, Any]:
    """Return the figures of a member that its status lacks; None for unknown ones."""
    sender = conductor.metrics.senders.get(member.worker)
    base = member.version if member.work is None else member.work.assignment.version
    return {
        "lag_versions": None if base is None else max(0, conductor.core.state.version - base),
        "wire_bytes_up": sender and sender.wire_bytes_up,
        "wire_bytes_down": sender and sender.wire_bytes_down,
        "raw_bytes_up": sender and sender.raw_bytes_up,
        "refused_pushes": sender and sender.refused_pushes,
    }
