"""Calls of a server's Status, for programs that are not asynchronous themselves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple

import grpc.aio

from ..common.exits import Exit
from ..proto.client import Client
from ..proto.findings import Target, UnreachedError
from ..proto.messages import StatusRequest, StatusResponse
from ..proto.reaching import reach
from ..proto.service import refusal_of

TIMEOUT_SECONDS = 2.0  # of a call by a function that `asking` yields

Call = Callable[[StatusRequest, float], StatusResponse]  # takes a timeout in seconds; `connected` yields it
Ask = Callable[[], StatusResponse | None]  # None: no answer in time; `asking` yields it


class NoAnswer(NamedTuple):
    """The reason why a server does not answer, with its remedy, and the exit code of a command for it."""

    text: str
    code: Exit


def why_silent(target: str, files: Mapping[str, str] | None = None) -> NoAnswer:
    """Find out why a server, host:port, does not answer, by gc-doctor's checks of its name, port and TLS."""
    wrong = next((each for each in reach(Target.at(target, **(files or {}))) if each.state == "wrong"), None)
    if wrong is None:
        remedy = "check that a gc-server of this release runs there"
        return NoAnswer(f"no answer from {target}; {remedy}", Exit.UNREACHABLE)
    code = Exit.UNREACHABLE if wrong.unreachable else Exit.REFUSED
    return NoAnswer(f"no answer from {target}: {wrong.text}; {wrong.remedy}", code)


@contextlib.contextmanager
def connected(target: Target) -> Generator[Call]:
    """Yield a function that calls a server's Status, in a with block.

    The function takes the request and a timeout in seconds, and returns the answer. It raises Refused,
    UnreachedError, grpc.aio.AioRpcError, or ValueError for an answer that cannot be read.
    """

    async def connect() -> Client:
        return Client(target)  # belongs to the running loop

    async def status(request: StatusRequest, timeout_s: float) -> Any:
        return await (await client.stub()).status(request, timeout=timeout_s)

    def call(request: StatusRequest, timeout_s: float) -> StatusResponse:
        try:
            reply = runner.run(status(request, timeout_s))
        except grpc.aio.AioRpcError as error:
            raise refusal_of(error) or error from None
        if not isinstance(reply, StatusResponse):
            raise ValueError(str(reply.text))
        return reply

    with asyncio.Runner() as runner:
        client = runner.run(connect())
        try:
            yield call
        finally:
            runner.run(client.close())


@contextlib.contextmanager
def asking(
    target: str,
    *,
    measured: bool = False,
    losses: bool = False,
    departed: bool = False,
    files: Mapping[str, str] | None = None,
) -> Generator[Ask]:
    """Yield a function that returns a server's status, in a with block.

    The function returns None if there is no answer in `TIMEOUT_SECONDS`. It raises Refused if the server
    refuses to answer this machine.

    Args:
        target: host:port.
        measured, losses, departed: also request measurements of steps, the history of the training loss, and
            departed members.
        files: paths of the files for TLS and a token, by field of `Target`.
    """
    request = StatusRequest(measured=measured, losses=losses, departed=departed)
    with connected(Target.at(target, **(files or {}))) as call:

        def ask() -> StatusResponse | None:
            try:
                return call(request, TIMEOUT_SECONDS)
            except (UnreachedError, grpc.aio.AioRpcError, ValueError):
                return None

        yield ask
