"""gc-doctor's checks of a server that can be reached: version, access, round trip, clock and bandwidth."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Generator

import grpc
import grpc.aio

from ..common.version import __version__
from ..proto.findings import Finding, Target
from ..proto.messages import StatusRequest, StatusResponse
from ..proto.refusal import Reason, Refused
from ..proto.service import SERVICE
from .status import Call, connected

TIMEOUT_S = 10.0
CALLS = 5  # for the round trip
PADDING_BYTES = (1 << 14, 1 << 16, 1 << 18, 1 << 19)  # for the bandwidth, until a call takes ENOUGH_S
ENOUGH_S = 0.3
CLOCK_S = 30.0  # least difference of two clocks that is a warning


def question(target: Target) -> Generator[Finding]:
    """Yield the finding of each check, until one fails."""
    with connected(target) as call:
        answered = _answer(call, token=bool(target.token_file))
        if isinstance(answered, Finding):
            yield answered
            return
        yield _version(answered)
        given = "with the token" if target.token_file else "without a token"
        yield Finding(check="access", state="ok", text=f"the server answers this machine, {given}")
        try:
            took_s = [_timed(call)[1] for _ in range(CALLS)]
            trip_s = statistics.median(took_s)
            text = f"{1e3 * trip_s:.1f} ms, slowest of {CALLS} {1e3 * max(took_s):.1f} ms"
            yield Finding(check="round trip", state="ok", text=text)
            yield _clock(call)
            yield _bandwidth(call, trip_s)
        except (grpc.aio.AioRpcError, Refused, ValueError) as error:
            text = f"the server has answered, and does no more: {_text(error)}"
            remedy = "is the link unsteady, or the server being stopped?"
            yield Finding(check="round trip", state="wrong", text=text, remedy=remedy, unreachable=True)


def _timed(call: Call, padding: bytes = b"", *, echo: bool = False) -> tuple[StatusResponse, float]:
    """Return the answer and the seconds that it took."""
    began = time.perf_counter()
    return call(StatusRequest(padding=padding, echo=echo), TIMEOUT_S), time.perf_counter() - began


def _answer(call: Call, *, token: bool) -> StatusResponse | Finding:
    try:
        return call(StatusRequest(), TIMEOUT_S)
    except Refused as refused:
        remedy = refused.refusal.remedy
        text = str(refused).removesuffix(f"; {remedy}")
        check = "version" if refused.refusal.reason is Reason.PROTOCOL_VERSION else "access"
        return Finding(check=check, state="wrong", text=text, remedy=remedy)
    except ValueError as error:
        text = f"the answer cannot be read: {error}"
        remedy = "install the same release of gradwire on both sides"
        return Finding(check="version", state="wrong", text=text, remedy=remedy)
    except grpc.aio.AioRpcError as error:
        if error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
            remedy = "is it the file of this job and of this worker?" if token else "add --token-file FILE"
            return Finding(check="access", state="wrong", text=error.details() or "refused", remedy=remedy)
        text = f"the server does not answer: {_text(error)}"
        remedy = "is it a gc-server, is it overloaded, and does no proxy between take gRPC apart?"
        return Finding(check="version", state="wrong", text=text, remedy=remedy, unreachable=True)


def _text(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error)


def _version(answer: StatusResponse) -> Finding:
    text = f"{SERVICE.full_name}, gradwire {answer.software} there, {__version__} here"
    if answer.software == __version__:
        return Finding(check="version", state="ok", text=text)
    return Finding(check="version", state="warning", text=text, remedy="use the same release on both sides")


def _clock(call: Call) -> Finding:
    asked_at = time.time()
    answer, took_s = _timed(call)
    ahead_s = answer.unix_seconds - (asked_at + took_s / 2)
    text = f"the server's is {abs(ahead_s):.1f} s {'ahead' if ahead_s > 0 else 'behind'}"
    if abs(ahead_s) <= CLOCK_S + took_s:
        return Finding(check="clock", state="ok", text=text)
    remedy = "set both by NTP: certificates and logs go by them"
    return Finding(check="clock", state="warning", text=text, remedy=remedy)


def _bandwidth(call: Call, trip_s: float) -> Finding:
    """Send at most 1 MiB of padding each way. The server returns no more than it was sent."""
    up_s = down_s = 0.0
    size = 0
    for size in PADDING_BYTES:
        padding = os.urandom(size)  # nothing between can compress it
        up_s = _timed(call, padding)[1]
        down_s = max(0.0, _timed(call, padding, echo=True)[1] - up_s)
        if up_s - trip_s > ENOUGH_S or down_s > ENOUGH_S:
            break
    up, down = _rate(size, up_s - trip_s), _rate(size, down_s)
    return Finding(check="bandwidth", state="ok", text=f"up {up}, down {down}, by {size >> 10} KiB")


def _rate(size: int, seconds: float) -> str:
    """Return the rate in words. A transfer of at most 1 ms gives only a lower bound."""
    mbit = size * 8 / 1e6 / max(seconds, 1e-3)
    return f"more than {mbit:,.0f} Mbit/s" if seconds <= 1e-3 else f"about {mbit:,.3g} Mbit/s"
