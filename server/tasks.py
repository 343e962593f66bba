"""The background tasks of a job, and the failure that ends it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable

from .durable.journal import JournalError
from .shard.store import DivergedError

log = logging.getLogger("gradwire.server")


class Tasks:
    """Runs awaitables in the background. The first failure of one fails the job: a round that cannot be
    applied would never close, and without ticks no lease would end. The conductor owns it.

    Attributes:
        failed: set once the job cannot continue.
        failure: reason why the job cannot continue; "" if it can.
        diverged: whether the reason is that parameters are not finite.
        unwritten: whether the reason is that the journal cannot be written.
        stopping: whether the server stops. Then a record that cannot be written is no failure, because
            another server will replay the journal.
    """

    def __init__(self) -> None:
        self.working: set[asyncio.Future[None]] = set()
        self.failed = asyncio.Event()
        self.failure = ""
        self.diverged = self.unwritten = self.stopping = False

    def run(self, work: Awaitable[None]) -> None:
        """Run an awaitable in the background."""
        task = asyncio.ensure_future(work)
        self.working.add(task)
        task.add_done_callback(self._done)

    def watch(self, task: asyncio.Future[None]) -> None:
        """Have a failure of `task` fail the job, without waiting for its end."""
        task.add_done_callback(self._done)

    def cannot_write(self, why: str) -> None:
        """Fail the job, because the journal cannot be written."""
        if not self.failed.is_set():
            self.failure, self.unwritten = why, True
            self.failed.set()

    async def wait(self) -> None:
        """Wait until no task is running."""
        while self.working:
            await asyncio.wait(set(self.working))

    def _done(self, task: asyncio.Future[None]) -> None:
        self.working.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if not (self.stopping and isinstance(error, JournalError)):
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Fail the job, unless it has failed before."""
        if self.failed.is_set():
            return
        self.diverged = isinstance(error, DivergedError)
        if self.diverged:
            self.failure = f"{error}; lower --learning-rate, or check the data"
        else:
            self.failure = f"the job cannot continue: {error!r}"
            log.error("%s", self.failure, exc_info=error)
        self.failed.set()
