"""Whether a server that can be reached answers a worker: version, token, clock, round trip and bandwidth."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Generator
from typing import Any

import grpc
import grpc.aio

from ..common.version import __version__
from ..proto.channel import credentials_of, dial
from ..proto.findings import Finding, Target
from ..proto.messages import StatusRequest, StatusResponse
from ..proto.refusal import Reason, Refused
from ..proto.service import SERVICE, Meter, Stub, refusal_of

TIMEOUT_S = 10.0
CALLS = 5  # for the round trip
PADDING_BYTES = (1 << 14, 1 << 16, 1 << 18, 1 << 19)  # for the bandwidth, the larger ones where it is quick
ENOUGH_S = 0.3  # for one of them
CLOCK_S = 30.0  # between two clocks, from which on it is worth a warning


class Patient:
    """A channel to a server, from a program that is not asynchronous itself."""

    def __init__(self, target: Target) -> None:
        self._runner = asyncio.Runner()
        self._channel = self._runner.run(self._open(target))
        silent: Meter = lambda _: None  # noqa: E731
        self._stub = Stub(
            self._channel, sent=silent, received=silent, metadata=lambda: credentials_of(target)
        )

    async def _open(self, target: Target) -> grpc.aio.Channel:
        return dial(target)

    def ask(self, padding: bytes = b"", *, echo: bool = False) -> tuple[StatusResponse, float]:
        """The answer and the seconds that it took. Raises Refused and grpc.aio.AioRpcError."""

        async def ask() -> Any:
            request = StatusRequest(padding=padding, echo=echo)
            return await self._stub.status(request, timeout=TIMEOUT_S)

        began = time.perf_counter()
        try:
            reply = self._runner.run(ask())
        except grpc.aio.AioRpcError as error:
            refused = refusal_of(error)
            if refused is not None:
                raise refused from None
            raise
        if not isinstance(reply, StatusResponse):
            raise ValueError(str(reply.text))
        return reply, time.perf_counter() - began

    def close(self) -> None:
        self._runner.run(self._channel.close(None))
        self._runner.close()


def question(target: Target) -> Generator[Finding]:
    """The checks of a server that can be reached."""
    patient = Patient(target)
    try:
        answered = _answer(patient, token=bool(target.token_file))
        if isinstance(answered, Finding):
            yield answered
            return
        yield _version(answered)
        yield _access(target)
        try:
            took_s = [patient.ask()[1] for _ in range(CALLS)]
            trip_s = statistics.median(took_s)
            text = f"{1e3 * trip_s:.1f} ms, slowest of {CALLS} {1e3 * max(took_s):.1f} ms"
            yield Finding(check="round trip", state="ok", text=text)
            yield _clock(patient)
            yield _bandwidth(patient, trip_s)
        except (grpc.aio.AioRpcError, Refused, ValueError) as error:
            text = f"the server has answered, and does no more: {_text(error)}"
            remedy = "is the link unsteady, or the server being stopped?"
            yield Finding(check="round trip", state="wrong", text=text, remedy=remedy, unreachable=True)
    finally:
        patient.close()


def _answer(patient: Patient, *, token: bool) -> StatusResponse | Finding:
    try:
        return patient.ask()[0]
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


def _access(target: Target) -> Finding:
    given = "with the token" if target.token_file else "without a token"
    return Finding(check="access", state="ok", text=f"the server answers this machine, {given}")


def _clock(patient: Patient) -> Finding:
    asked_at = time.time()
    answer, took_s = patient.ask()
    ahead_s = answer.unix_seconds - (asked_at + took_s / 2)
    text = f"the server's is {abs(ahead_s):.1f} s {'ahead' if ahead_s > 0 else 'behind'}"
    if abs(ahead_s) <= CLOCK_S + took_s:
        return Finding(check="clock", state="ok", text=text)
    remedy = "set both by NTP: certificates and logs go by them"
    return Finding(check="clock", state="warning", text=text, remedy=remedy)


def _bandwidth(patient: Patient, trip_s: float) -> Finding:
    """By padding of at most 1 MiB in all, each way; the server sends no more than it was sent."""
    up_s = down_s = 0.0
    size = 0
    for size in PADDING_BYTES:
        padding = os.urandom(size)  # nothing between can compress it
        up_s = patient.ask(padding)[1]
        down_s = max(0.0, patient.ask(padding, echo=True)[1] - up_s)
        if up_s - trip_s > ENOUGH_S or down_s > ENOUGH_S:
            break
    up, down = _rate(size, up_s - trip_s), _rate(size, down_s)
    return Finding(check="bandwidth", state="ok", text=f"up {up}, down {down}, by {size >> 10} KiB")


def _rate(size: int, seconds: float) -> str:
    """In words; what is over sooner than can be measured is only known to be fast."""
    mbit = size * 8 / 1e6 / max(seconds, 1e-3)
    return f"more than {mbit:,.0f} Mbit/s" if seconds <= 1e-3 else f"about {mbit:,.3g} Mbit/s"
