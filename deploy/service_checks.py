"""gc-doctor's checks of a server that can be reached: version, access, round trip, clock and bandwidth."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Generator

import grpc
import grpc.aio

from ..common.version import __version__
from ..proto.findings import Finding, Target, UnreachedError
from ..proto.messages import StatusRequest, StatusResponse
from ..proto.refusal import Reason, Refused
from ..proto.service import SERVICE, proxy_of
from ..proto.wire import PROBE_BYTES
from .status import Call, connected

TIMEOUT_S = 10.0
CALLS = 5  # timed for the round trip
PADDING_BYTES = (1 << 14, 1 << 16, 1 << 18, 1 << 19)  # sizes tried for the bandwidth, until ENOUGH_S
ENOUGH_S = 0.3  # a transfer of this length measures the bandwidth well enough
CLOCK_S = 30.0  # a larger difference between the two clocks is a warning


def check_service(target: Target) -> Generator[Finding]:
    """Run the checks that call the server's Status, and yield the finding of each, until one fails."""
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
            yield _large_call(call)
        except (UnreachedError, grpc.aio.AioRpcError, Refused, ValueError) as error:
            text = f"the server has stopped answering: {_text(error)}"
            remedy = "check that the link is steady and that the server still runs"
            yield Finding(check="round trip", state="wrong", text=text, remedy=remedy, unreachable=True)


def _timed(call: Call, padding: bytes = b"", *, echo: bool = False) -> tuple[StatusResponse, float]:
    """Call Status, and return the answer and the seconds that the call took.

    Args:
        padding: bytes that make the request larger.
        echo: True if the server has to send the padding back.
    """
    began = time.perf_counter()
    return call(StatusRequest(padding=padding, echo=echo), TIMEOUT_S), time.perf_counter() - began


def _answer(call: Call, *, token: bool) -> StatusResponse | Finding:
    """Return the server's first answer, or the finding that explains why there is none."""
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
    except UnreachedError as error:  # it was open a moment ago
        return error.finding
    except grpc.aio.AioRpcError as error:
        if proxy := proxy_of(error):
            return proxy
        if error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
            remedy = "use the token file of this job and of this worker" if token else "add --token-file FILE"
            return Finding(check="access", state="wrong", text=error.details() or "refused", remedy=remedy)
        text = f"the server does not answer: {_text(error)}"
        remedy = "check that it is a gc-server, that it is not overloaded, and that no proxy terminates gRPC"
        return Finding(check="version", state="wrong", text=text, remedy=remedy, unreachable=True)


def _text(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error)


def _version(answer: StatusResponse) -> Finding:
    """Compare the releases of both sides; a difference is a warning."""
    text = f"{SERVICE.full_name}, gradwire {answer.software} there, {__version__} here"
    if answer.software == __version__:
        return Finding(check="version", state="ok", text=text)
    return Finding(check="version", state="warning", text=text, remedy="use the same release on both sides")


def _clock(call: Call) -> Finding:
    """Compare the two clocks, taking the server's time as that of the middle of the call."""
    asked_at = time.time()
    answer, took_s = _timed(call)
    ahead_s = answer.unix_seconds - (asked_at + took_s / 2)
    text = f"the server's clock is {abs(ahead_s):.1f} s {'ahead' if ahead_s > 0 else 'behind'}"
    if abs(ahead_s) <= CLOCK_S + took_s:
        return Finding(check="clock", state="ok", text=text)
    remedy = "set both clocks by NTP: certificates and logs depend on them"
    return Finding(check="clock", state="warning", text=text, remedy=remedy)


def _bandwidth(call: Call, trip_s: float) -> Finding:
    """Measure the rate in both directions with paddings of growing size, together about 1 MiB each way.

    The server sends back at most the bytes that it has received.
    """
    up_s = down_s = 0.0
    size = 0
    for size in PADDING_BYTES:
        padding = os.urandom(size)  # random: a proxy cannot compress it
        up_s = _timed(call, padding)[1]
        down_s = max(0.0, _timed(call, padding, echo=True)[1] - up_s)
        if up_s - trip_s > ENOUGH_S or down_s > ENOUGH_S:
            break
    up, down = _rate(size, up_s - trip_s), _rate(size, down_s)
    return Finding(check="bandwidth", state="ok", text=f"up {up}, down {down}, by {size >> 10} KiB")


def _large_call(call: Call) -> Finding:
    """Check that no proxy refuses requests that are larger than those before."""
    try:
        _timed(call, os.urandom(PROBE_BYTES))
    except grpc.aio.AioRpcError as error:
        proxy = proxy_of(error)
        if proxy is None:
            raise
        return proxy
    return Finding(check="large call", state="ok", text=f"{PROBE_BYTES >> 10} KiB pass")


def _rate(size: int, seconds: float) -> str:
    """Return the rate as text, such as `about 95 Mbit/s`.

    A transfer of at most 1 ms gives only a lower bound.
    """
    mbit = size * 8 / 1e6 / max(seconds, 1e-3)
    return f"more than {mbit:,.0f} Mbit/s" if seconds <= 1e-3 else f"about {mbit:,.3g} Mbit/s"
