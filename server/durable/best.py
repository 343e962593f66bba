"""The best version, kept while the job continues: each version that is evaluated is copied as its evaluation
begins, and kept if control says that it is the best so far.

`BestFile` keeps a model beside --output. `BestCheckpoint` keeps what a new job can begin with in the folder
of --state: parameters, the optimizer's state and buffers. It is no checkpoint of the job.
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


class BestCheckpoint:
    """Belongs to one event loop."""

    def __init__(self, recorder: Recorder, shard: Shard, state: ModelState) -> None:
        self._recorder, self._shard, self._state = recorder, shard, state
        self._of: tuple[int, int] | None = None  # epoch and version of the candidate
        self._candidate: asyncio.Task[Tree] | None = None
        self._doing: asyncio.Task[None] | None = None

    def evaluated(self, epoch: int, version: int) -> None:
        """Somebody is about to evaluate a version, which the shard has at this moment. Copy it."""
        if self._of == (epoch, version):  # told again
            return
        assert self._shard.reported.manifest is not None
        self._of = epoch, version
        # The shard keeps the order of what it is asked: before the next apply, so it is of this version.
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
        """What was evaluated is better than all before."""
        if self._of != (epoch, version) or self._candidate is None:
            text = "version %d, the best so far, was evaluated before a restart and is not kept in --state"
            log.warning(text, version)
            return
        self._doing = asyncio.ensure_future(self._write(version, self._candidate, self._doing))

    def judged(self) -> None:
        """The candidate is written down already, or never will be."""
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
        """Finish, unless the place hangs."""
        if self._doing is not None:
            await asyncio.wait({self._doing}, timeout=self._recorder.patience_s)
