"""The best version. Each version is copied when its evaluation begins; the copy is kept if control reports it
as the best so far.

`BestFile` keeps a model beside --output. `BestCheckpoint` keeps parameters, optimizer state and buffers in
the folder of --state, so that a new job can begin with them. It is no checkpoint of the job.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from ...common.parts import Plan
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
    """Keeps the model of the best version in a file. It belongs to one event loop; its tasks run one after
    the other.

    Attributes:
        path: path of the best version's file. The file of a candidate lies beside it.
    """

    def __init__(self, path: Path, shard: Shard, state: ModelState) -> None:
        self.path = path
        self._candidate = path.with_name(path.name + ".candidate")
        self._shard, self._state = shard, state
        self._of: tuple[int, int] | None = None  # epoch and version of the candidate
        self._doing: asyncio.Task[bool] | None = None  # the last task; returns whether it succeeded

    def evaluated(self, epoch: int, version: int) -> None:
        """Write the shard's present version, which a member is about to evaluate, to the candidate's file."""
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
            log.error("could not save version %d, which is being evaluated: %s", version, error)
            return False
        return True

    def best(self, epoch: int, version: int) -> None:
        """Replace the file by the candidate, which is the best so far."""
        if self._of == (epoch, version) and self._doing is not None:
            self._doing = asyncio.ensure_future(self._take(version, self._doing))

    def judged(self) -> None:
        """Called after an evaluation: do nothing, because the next candidate overwrites this one."""

    async def _take(self, version: int, written: Awaitable[bool]) -> bool:
        if not await written:
            return False
        try:
            await asyncio.to_thread(self._candidate.replace, self.path)
        except OSError as error:
            log.error("could not save version %d, the best so far, as %s: %s", version, self.path, error)
            return False
        log.info("version %d, the best so far, written to %s", version, self.path)
        return True

    async def close(self) -> None:
        """Wait for the last task, and remove the candidate's file."""
        if self._doing is not None:
            await self._doing
        self._candidate.unlink(missing_ok=True)


class BestCheckpoint:
    """Keeps the best version in the folder of --state. It belongs to one event loop."""

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
        kept = {name: image[name] for name in ("version", "parameters", "optimizer", "shared", "compressor")}
        return {
            "manifest": manifest.to_message(),
            "plan": plan_message(plan),
            "shard": {**kept, "downlink": {"replica": image["downlink"]["replica"]}},
            "state": {"frozen": dict(self._state.frozen), "buffers": dict(await buffers)},
        }

    def best(self, epoch: int, version: int) -> None:
        """Write the candidate to the folder, as the best version so far. Log a warning if there is none."""
        if self._of != (epoch, version) or self._candidate is None:
            text = "version %d, the best so far, was evaluated before a restart and is not kept in --state"
            log.warning(text, version)
            return
        self._doing = asyncio.ensure_future(self._write(version, self._candidate, self._doing))

    def judged(self) -> None:
        """Called after an evaluation: drop the candidate, which is being written or was not the best."""
        self._candidate = None

    async def _write(self, version: int, candidate: Awaitable[Tree], before: Awaitable[None] | None) -> None:
        if before is not None:
            await before
        try:
            tree = await candidate
            if tree["shard"]["version"] != version:
                raise ValueError(f"the copy has version {tree['shard']['version']}")
            await self._recorder.write_best(version, tree)
        except Exception as error:
            self._recorder.failures += 1
            log.error("could not write version %d, the best so far, to --state: %s", version, error)
        else:
            log.info("version %d, the best so far, written to --state", version)

    async def close(self) -> None:
        """Wait until the best version is written to the folder, unless the backend hangs."""
        if self._doing is not None:
            await asyncio.wait({self._doing}, timeout=self._recorder.patience_s)
