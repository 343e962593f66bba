"""The best version. Each version is copied when its evaluation begins; the copy is kept if control reports it
as the best so far.

`BestFile` keeps a model beside --output. `BestCheckpoint` keeps parameters, optimizer state and buffers, with
which a new job can begin, in the folder of --state. It is no checkpoint of the job.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from ...compressors import Plan
from ...proto.manifest import Manifest
from ...proto.plans import plan_message
from ..shard.model_state import ModelState, Values, complete
from ..shard.shard import Image, Shard
from ..shard.store import Copy
from ..shard.writing import write_model
from .recorder import Recorder

log = logging.getLogger("gradwire.server")
Tree = dict[str, Any]


class BestFile:
    """Belongs to one event loop. Its tasks run one after the other.

    Attributes:
        path: of the best version. A candidate lies beside it.
    """

    def __init__(self, path: Path, shard: Shard, state: ModelState) -> None:
        self.path = path
        self._candidate = path.with_name(path.name + ".candidate")
        self._shard, self._state = shard, state
        self._of: tuple[int, int] | None = None  # epoch and version of the candidate
        self._doing: asyncio.Task[bool] | None = None  # the last task; returns whether it succeeded

    def evaluated(self, epoch: int, version: int) -> None:
        """Write the shard's present version, which a member is about to evaluate, as the candidate."""
        if self._of == (epoch, version):  # asked again after a reconnect
            return
        self._of = epoch, version
        # The shard takes orders in turn, so the copy is made before the next version.
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
        """Keep the candidate, which is the best so far."""
        if self._of == (epoch, version) and self._doing is not None:
            self._doing = asyncio.ensure_future(self._take(version, self._doing))

    def judged(self) -> None:
        """Keep the candidate on the disk until the next one."""

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
        """Wait for the last task, and remove the candidate."""
        if self._doing is not None:
            await self._doing
        self._candidate.unlink(missing_ok=True)


class BestCheckpoint:
    """Belongs to one event loop."""

    def __init__(self, recorder: Recorder, shard: Shard, state: ModelState) -> None:
        self._recorder, self._shard, self._state = recorder, shard, state
        self._of: tuple[int, int] | None = None  # epoch and version of the candidate
        self._candidate: asyncio.Task[Tree] | None = None
        self._doing: asyncio.Task[None] | None = None

    def evaluated(self, epoch: int, version: int) -> None:
        """Copy the shard's present version, which a member is about to evaluate, as the candidate."""
        if self._of == (epoch, version):  # asked again after a reconnect
            return
        assert self._shard.reported.manifest is not None
        self._of = epoch, version
        # The shard takes orders in turn, so the copy is made before the next version.
        copying, buffers = self._shard.image(), self._state.of(epoch)
        self._candidate = asyncio.ensure_future(
            self._tree(copying, buffers, self._shard.reported.manifest, self._shard.reported.plan)
        )

    async def _tree(
        self, copying: Awaitable[Image], buffers: Awaitable[Values], manifest: Manifest, plan: Plan
    ) -> Tree:
        image = await copying
        kept = {name: image[name] for name in ("version", "parameters", "optimizer")}
        return {
            "manifest": manifest.to_message(),
            "plan": plan_message(plan),
            "shard": {**kept, "downlink": {"replica": image["downlink"]["replica"]}},
            "state": {"frozen": dict(self._state.frozen), "buffers": dict(await buffers)},
        }

    def best(self, epoch: int, version: int) -> None:
        """Keep the candidate, which is the best so far."""
        if self._of != (epoch, version) or self._candidate is None:
            text = "version %d, the best so far, was evaluated before a restart and is not kept in --state"
            log.warning(text, version)
            return
        self._doing = asyncio.ensure_future(self._write(version, self._candidate, self._doing))

    def judged(self) -> None:
        """Forget the candidate, which is being written or was not the best."""
        self._candidate = None

    async def _write(self, version: int, candidate: Awaitable[Tree], before: Awaitable[None] | None) -> None:
        if before is not None:
            await before
        try:
            tree = await candidate
            if tree["shard"]["version"] != version:
                raise ValueError(f"the server is at version {tree['shard']['version']} already")
            await self._recorder.write_best(version, tree)
        except Exception as error:
            self._recorder.failures += 1
            log.error("version %d, the best so far, could not be written to --state: %s", version, error)
        else:
            log.info("version %d, the best so far, written to --state", version)

    async def close(self) -> None:
        """Wait for the last task, unless the backend hangs."""
        if self._doing is not None:
            await asyncio.wait({self._doing}, timeout=self._recorder.patience_s)
