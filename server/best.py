"""The best version's file: each version that is evaluated is written down meanwhile, and becomes the file of
the best one if control says so."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from pathlib import Path

from .model_state import ModelState, Values, complete
from .shard.shard import Shard
from .shard.store import Copy
from .shard.writing import write_model

log = logging.getLogger("gradwire.server")


class BestFile:
    """Belongs to one event loop. Each thing that it does waits for the one before.

    Attributes:
        path: of the best version. A candidate lies beside it.
    """

    def __init__(self, path: Path, shard: Shard, state: ModelState) -> None:
        self.path = path
        self._candidate = path.with_name(path.name + ".candidate")
        self._shard, self._state = shard, state
        self._of: tuple[int, int] | None = None  # epoch and version of the candidate
        self._doing: asyncio.Task[bool] | None = None  # the last thing; whether it went well

    def evaluated(self, epoch: int, version: int) -> None:
        """Somebody is about to evaluate a version, which the shard has at this moment. Take it down."""
        if self._of == (epoch, version):  # told again
            return
        self._of = epoch, version
        # The shard keeps the order of what it is asked: before the next apply, so it is of this version.
        copying, buffers = self._shard.copy(), self._state.of(epoch)
        self._doing = asyncio.ensure_future(self._write(copying, buffers, version, self._doing))

    async def _write(
        self,
        copying: Awaitable[Copy],
        buffers: Awaitable[Values],
        version: int,
        before: Awaitable[bool] | None,
    ) -> bool:
        copy = await copying
        if before is not None:
            await before
        values = {**self._state.frozen, **await buffers}

        def write() -> None:
            tensors = complete(copy.parameters, self._state.entries, values)
            write_model(self._candidate, tensors, version=version, digest=copy.digest, finished=False)

        try:
            await asyncio.to_thread(write)
        except Exception as error:
            log.error("version %d, which is evaluated, could not be written down: %s", version, error)
            return False
        return True

    def best(self, epoch: int, version: int) -> None:
        """What was evaluated is better than all before."""
        if self._of == (epoch, version) and self._doing is not None:
            self._doing = asyncio.ensure_future(self._take(version, self._doing))

    def judged(self) -> None:
        """The candidate stays on the disk until the next."""

    async def _take(self, version: int, written: Awaitable[bool]) -> bool:
        if not await written:
            return False
        try:
            await asyncio.to_thread(self._candidate.replace, self.path)
        except OSError as error:
            log.error("version %d, the best so far, could not be kept as %s: %s", version, self.path, error)
            return False
        log.info("version %d, the best so far, written to %s", version, self.path)
        return True

    async def close(self) -> None:
        """Finish, and leave nothing else behind."""
        if self._doing is not None:
            await self._doing
        self._candidate.unlink(missing_ok=True)
