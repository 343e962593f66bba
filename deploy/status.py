"""Calls of a server's Status, from programs that are not asynchronous themselves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple

import grpc.aio

from ..common.exits import Exit
from ..proto.channel import credentials_of, dial
from ..proto.findings import Target
from ..proto.messages import StatusRequest, StatusResponse
from ..proto.reaching import reach
from ..proto.service import Stub, refusal_of

TIMEOUT_SECONDS = 2.0

Call = Callable[[StatusRequest, float], StatusResponse]
Ask = Callable[[], StatusResponse | None]


class NoAnswer(NamedTuple):
    """Why a server does not answer, as a sentence that ends with the remedy, and the exit code for it."""

    text: str
    code: Exit


def why_silent(target: str, files: Mapping[str, str] | None = None) -> NoAnswer:
    """Check name, port and TLS, as gc-doctor does, of a server that does not answer.

    Args:
        target, files: as `asking` takes them.
    """
    wrong = next((each for each in reach(Target.at(target, **(files or {}))) if each.state == "wrong"), None)
    if wrong is None:
        return NoAnswer(f"no answer from {target}; is a gc-server of this release there?", Exit.UNREACHABLE)
    code = Exit.UNREACHABLE if wrong.unreachable else Exit.REFUSED
    return NoAnswer(f"no answer from {target}: {wrong.text}; {wrong.remedy}", code)


@contextlib.contextmanager
def connected(target: Target) -> Generator[Call]:
    """Yield a function that calls Status, given a request and a timeout in seconds, and waits for the answer.

    The function raises Refused, grpc.aio.AioRpcError, or ValueError for an answer that cannot be read.
    """

    async def connect() -> grpc.aio.Channel:
        return dial(target)  # belongs to the running loop

    async def status(request: StatusRequest, timeout_s: float) -> Any:
        return await stub.status(request, timeout=timeout_s)

    def call(request: StatusRequest, timeout_s: float) -> StatusResponse:
        try:
            reply = runner.run(status(request, timeout_s))
        except grpc.aio.AioRpcError as error:
            raise refusal_of(error) or error from None
        if not isinstance(reply, StatusResponse):
            raise ValueError(str(reply.text))
        return reply

    with asyncio.Runner() as runner:
        channel = runner.run(connect())
        stub = Stub(
            channel,
            sent=lambda _: None,
            received=lambda _: None,
            metadata=lambda: credentials_of(target),
        )
        try:
            yield call
        finally:
            runner.run(channel.close(None))


@contextlib.contextmanager
def asking(
    target: str, *, measured: bool = False, losses: bool = False, files: Mapping[str, str] | None = None
) -> Generator[Ask]:
    """Yield a function that returns a server's status, or None without an answer in `TIMEOUT_SECONDS`.

    The function raises Refused if the server refuses to answer this machine.

    Args:
        target: host:port.
        measured: also ask for the server's measurements of its steps.
        losses: also ask for the history of the training loss.
        files: for TLS and a token, as `Target` takes them.
    """
    with connected(Target.at(target, **(files or {}))) as call:

        def ask() -> StatusResponse | None:
            try:
                return call(StatusRequest(measured=measured, losses=losses), TIMEOUT_SECONDS)
            except (grpc.aio.AioRpcError, ValueError):
                return None

        yield ask
