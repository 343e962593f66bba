"""Attempts to reach a server: errors that allow another attempt, pauses between attempts, and their end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from typing import Any

import grpc
import grpc.aio

from ...proto.client import Client
from ...proto.findings import UnreachedError
from ...proto.messages import StatusRequest
from ...proto.refusal import Reason, Refused
from ...proto.service import proxy_of, refusal_of
from ...proto.wire import PROBE_BYTES

log = logging.getLogger("gradwire.worker")

CALL_TIMEOUT_S = 10.0
PAUSES_S = (0.2, 0.5, 1.0, 2.0, 5.0)  # between attempts; the last one repeats, each with jitter

_JITTER = random.Random()  # its own: the global generator belongs to the task or script

FIRST_SILENCE_S = 5.0  # seconds before the second warning; each further one comes after twice the time

# Refusals of bytes that were damaged in transit. Another stream may succeed, and attempts are bounded.
DAMAGED = (Reason.CHECKSUM, Reason.CHUNK, Reason.MALFORMED)


class UnreachableError(Exception):
    """Raised when no attempt to reach the server has succeeded within the allowed time.

    Example:
        >>> try:
        ...     gradwire.connect(server="localhost:1", connect_seconds=0)
        ... except gradwire.UnreachableError as error:
        ...     print(error)
        cannot reach localhost:1 after 0 s and 1 attempts...
    """


RUNNING = "is gc-server running there, and is its port open to this machine?"


class BrokenError(Exception):
    """Raised when a call or stream failed in a way that another attempt may repair.

    Attributes:
        unclear: True if gRPC gives no reason. A proxy that refuses a long request is often reported so.
    """

    def __init__(self, text: str, remedy: str = RUNNING, *, unclear: bool = False) -> None:
        super().__init__(text)
        self.remedy = remedy
        self.unclear = unclear


class Attempts:
    """A series of attempts to reach a server: pauses between them, warnings, and a time limit.

    The time counts from the first failure on, or, once an attempt has brought a transfer further than all
    before it, from the next failure. A transfer may therefore take longer than the limit.
    """

    def __init__(self, address: str, allowed_s: float) -> None:
        """allowed_s: seconds after the first failure after which `pause` gives up."""
        self._address = address
        self._allowed_s = allowed_s
        self._furthest = 0
        self._explained = False
        self._restart()

    def _restart(self) -> None:
        self._began: float | None = None  # of the first failure
        self._count = 0
        self._silent_s = 0.0  # seconds after the first failure before which no warning is logged

    def reached(self, count: int) -> None:
        """Note that an attempt has transferred `count` messages, from the first one of the transfer on."""
        if count > self._furthest:
            self._furthest = count
            self._restart()

    @property
    def over(self) -> bool:
        """True if the time limit has passed."""
        return self._failed_s >= self._allowed_s

    @property
    def _failed_s(self) -> float:
        return 0.0 if self._began is None else time.monotonic() - self._began

    async def explain(self, broken: BrokenError, client: Client) -> None:
        """Find out, once for an unclear failure, whether a proxy refuses requests of a worker's size. Raises
        UnreachableError if a proxy refuses them, so no attempt can succeed."""
        if not broken.unclear or self._explained:
            return
        self._explained = True
        with contextlib.suppress(BrokenError, Refused):
            stub = await translated(client.stub())
            await translated(stub.status(StatusRequest(padding=bytes(PROBE_BYTES)), timeout=CALL_TIMEOUT_S))

    async def pause(self, reason: str, remedy: str = RUNNING) -> None:
        """Wait before the next attempt, and sometimes log a warning. Raises UnreachableError if the time
        limit has passed, so no attempt should follow."""
        if self._began is None:
            self._began = time.monotonic()
        if self.over:
            raise UnreachableError(
                f"cannot reach {self._address} after {self._allowed_s:g} s and {self._count + 1} attempts: "
                f"{reason}; {remedy}"
            )
        pause_s = PAUSES_S[min(self._count, len(PAUSES_S) - 1)] * _JITTER.uniform(0.8, 1.2)
        self._count += 1
        waited_s = self._failed_s
        remaining_s = max(0.0, self._allowed_s - waited_s)
        if waited_s >= self._silent_s:  # at once, then after 5 s, and then each time after twice as long
            self._silent_s = max(FIRST_SILENCE_S, 2 * waited_s)
            hint = "" if remedy == RUNNING else f"; {remedy}"
            log.warning(
                "waiting for a gc-server at %s, for up to %.0f s more: %s%s",
                *(self._address, remaining_s, reason, hint),
            )
        await asyncio.sleep(min(pause_s, remaining_s))


async def translated(awaitable: Any) -> Any:
    """Await a gRPC call, and translate its errors. Returns the call's result.

    Raises:
        Refused: the server refused the call for a reason that another attempt does not change.
        UnreachableError: a proxy refused it for such a reason.
        BrokenError: another attempt may succeed.
    """
    try:
        return await awaitable
    except grpc.aio.AioRpcError as error:
        refused = refusal_of(error)
        if refused is not None and refused.refusal.reason not in DAMAGED:
            raise refused from None
        proxy = proxy_of(error)
        if proxy is not None and not proxy.unreachable:
            raise UnreachableError(f"{proxy.text}; {proxy.remedy}") from None
        if proxy is not None:
            raise BrokenError(proxy.text, proxy.remedy) from None
        unclear = error.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
        raise BrokenError(f"{error.code().name}: {error.details()}", unclear=unclear) from None
    except UnreachedError as error:
        raise BrokenError(error.finding.text, error.finding.remedy) from None
    except Refused as refused:  # this worker refused the server's message: request it again
        raise BrokenError(str(refused)) from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise BrokenError("the connection was given up, because the worker's stream broke") from None
    except asyncio.InvalidStateError as error:
        raise BrokenError(str(error)) from None
