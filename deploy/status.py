"""Asks a server how its job is doing."""

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


class NoAnswer(NamedTuple):
    """Why a server does not answer, as a sentence that ends with the remedy, and the exit code for it."""

    text: str
    code: Exit


Ask = Callable[[], StatusResponse | None]


def why_silent(target: str, files: Mapping[str, str] | None = None) -> NoAnswer:
    """Find out by name, port and TLS, as gc-doctor does, why a server does not answer.

    Args:
        target, files: as `asking` takes them.
    """
    wrong = next((each for each in reach(Target.at(target, **(files or {}))) if each.state == "wrong"), None)
    if wrong is None:
        return NoAnswer(f"no answer from {target}; is a gc-server of this release there?", Exit.UNREACHABLE)
    code = Exit.UNREACHABLE if wrong.unreachable else Exit.REFUSED
    return NoAnswer(f"no answer from {target}: {wrong.text}; {wrong.remedy}", code)


@contextlib.contextmanager
def asking(
    target: str, *, measured: bool = False, losses: bool = False, files: Mapping[str, str] | None = None
) -> Generator[Ask]:
    """A function that asks the server at `target`, host:port, from a program that is not asynchronous itself.

    files: for TLS and a token, as in `Target`.
    measured: whether also for what has been measured of its steps. losses: for how its training loss went.

    It returns the answer, or None when there is none within `TIMEOUT_SECONDS`, and raises Refused where the
    server does not want to be asked from here. Where there was no answer, `why_silent` says why.
    """

    server = Target.at(target, **(files or {}))

    async def connect() -> grpc.aio.Channel:
        return dial(server)  # belongs to the running loop

    async def ask() -> StatusResponse | None:
        try:
            reply: Any = await stub.status(
                StatusRequest(measured=measured, losses=losses), timeout=TIMEOUT_SECONDS
            )
        except grpc.aio.AioRpcError as error:
            refused = refusal_of(error)
            if refused is not None:
                raise refused from None
            return None
        return reply if isinstance(reply, StatusResponse) else None

    with asyncio.Runner() as runner:
        channel = runner.run(connect())
        stub = Stub(
            channel,
            sent=lambda _: None,
            received=lambda _: None,
            metadata=lambda: credentials_of(server),
        )
        try:
            yield lambda: runner.run(ask())
        finally:
            runner.run(channel.close(None))
