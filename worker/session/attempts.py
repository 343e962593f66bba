"""Attempts to reach a server: whether to try again, how long to wait, and when to give up."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from typing import Any

import grpc.aio

from ...proto.refusal import Reason, Refused
from ...proto.service import refusal_of

log = logging.getLogger("gradwire.worker")

CALL_TIMEOUT_S = 10.0
PAUSES_S = (0.2, 0.5, 1.0, 2.0, 5.0)  # between attempts; the last one repeats, each with jitter

_JITTER = random.Random()  # the process's own numbers are the task's, or the script's

FIRST_SILENCE_S = 5.0

# What a server says to bytes that were changed on their way: worth another stream, and attempts are bounded.
DAMAGED = (Reason.CHECKSUM, Reason.CHUNK, Reason.MALFORMED)


class UnreachableError(Exception):
    """No server could be talked to for as long as was allowed."""


class BrokenError(Exception):
    """The connection failed in a way that another attempt may mend."""


class Attempts:
    """Pauses between attempts, and an end to them."""

    def __init__(self, address: str, allowed_s: float) -> None:
        self._address = address
        self._allowed_s = allowed_s
        self._began = time.monotonic()
        self._count = 0
        self._silent_s = 0.0  # after which the next attempt is logged

    @property
    def over(self) -> bool:
        return time.monotonic() - self._began >= self._allowed_s

    async def pause(self, reason: str) -> None:
        """Wait before the next attempt. Raises UnreachableError when there shall be none."""
        if self.over:
            raise UnreachableError(
                f"cannot reach {self._address} after {self._allowed_s:g} s and {self._count + 1} attempts: "
                f"{reason}; is gc-server running there, and is its port open to this machine?"
            )
        pause_s = PAUSES_S[min(self._count, len(PAUSES_S) - 1)] * _JITTER.uniform(0.8, 1.2)
        self._count += 1
        waited_s = time.monotonic() - self._began
        remaining_s = max(0.0, self._allowed_s - waited_s)
        if waited_s >= self._silent_s:  # at once, and then ever more rarely
            self._silent_s = max(FIRST_SILENCE_S, 2 * waited_s)
            log.warning(
                "waiting for a gc-server at %s, for up to %.0f s more: %s", self._address, remaining_s, reason
            )
        await asyncio.sleep(min(pause_s, remaining_s))


async def translated(awaitable: Any) -> Any:
    """Await a call. Raises Refused for a typed refusal, BrokenError for anything that may pass."""
    try:
        return await awaitable
    except grpc.aio.AioRpcError as error:
        refused = refusal_of(error)
        if refused is not None and refused.refusal.reason not in DAMAGED:
            raise refused from None
        raise BrokenError(f"{error.code().name}: {error.details()}") from None
    except Refused as refused:  # this side refused what the server sent: ask for it again
        raise BrokenError(str(refused)) from None
    except asyncio.InvalidStateError as error:
        raise BrokenError(str(error)) from None
