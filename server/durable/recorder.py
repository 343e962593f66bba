"""The recorder writes the journal and the checkpoints of a running server: events that control has taken in,
stored parts, and from time to time a checkpoint, after which the journal begins a new segment.

`recovery` reads them. An event is recorded after control has decided and before any of its actions is
performed; a part is recorded before the shard has it. What follows from these is not recorded: stepped parts,
the content of versions, updates. Nor are keep-alives without an activity; instead a tick, which ends leases,
has the time at which each member was last heard. Times are those of the job's own clock, which stands still
while no server runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from ...common.spec import Length
from ...compressors import Payload
from ...proto import messages as m
from ...proto.refusal import Refusal
from ...proto.transfer import Bytes
from ...proto.wire import encode_worker
from ...storage import checkpoint
from ..job import events as e
from ..job.core import Core
from .folder import StateFolder, journal_limit, segment_limit
from .journal import Journal, JournalError

log = logging.getLogger("gradwire.server")

RETRY_S = 30.0  # after a checkpoint that could not be begun

T = TypeVar("T")
Member = tuple[str, int]
Stored = tuple[Member, m.PartHeader, int, Sequence[Payload]]  # a part, the crc32c of its bytes, its content

EVENT, PART, CLOSED, UNWANTED, PLAN = "event", "part", "closed", "unwanted", "plan"
BUFFERS, EVALUATED = "buffers", "evaluated"
# Events that follow from other records, or change nothing that is saved.
_NOT_RECORDED = (e.ApplyStarted, e.PauseRequested, e.Stopping)
# Seconds after which a backend that writes a checkpoint counts as hanging, and bytes that add to them.
PATIENCE_S, SLOWEST_BYTES_PER_S = 60.0, 1e6


class Recorder:
    """Belongs to the conductor's event loop. It writes nothing without a folder (the job ends with its
    server), before `first`, and during a recovery.

    Attributes:
        broken: called with the reason when the journal cannot be written any more: the server has to end, and
            workers wait for the next one, which continues the job.
        failing: why the last checkpoint could not be written; empty if it could.
        failures: number of checkpoints that could not be written.
        bytes, version: of the last checkpoint; 0 and None before the first. After a recovery `version` is
            None until this process has written one.
        patience_s: seconds after which a backend that writes a checkpoint counts as hanging.
    """

    def __init__(
        self,
        folder: StateFolder | None = None,
        every: Length | None = None,
        *,
        job: str = "",
        recorded: bool = True,
    ) -> None:
        """
        Args:
            every: length of training after which a checkpoint is due.
            recorded: whether there is a journal between checkpoints.
        """
        self._folder, self._every, self._job = folder, every, job
        self._recorded = recorded
        self.broken: Callable[[str], None] = lambda why: None
        self._journal: Journal | None = None
        self._heard: dict[str, float] = {}
        self._last = 0, math.inf, 0.0  # version, time and epochs of the last checkpoint
        self._bytes_before = 0  # of segments before this one, since the last checkpoint that is whole
        self._writing: asyncio.Task[None] | None = None
        self._retry_at = -math.inf  # seconds, after a checkpoint that could not be written
        self._stopped = False
        self.patience_s = PATIENCE_S
        self.failing, self.failures = "", 0
        self.bytes = 0
        self.version: int | None = None

    @property
    def keeps(self) -> bool:
        """Whether the job outlives its server."""
        return self._folder is not None

    def begin(self, version: int) -> None:
        """Begin the segment that follows the checkpoint of this version, which has yet to be written.

        Raises:
            OSError: the previous segment continues.
            JournalError: the previous segment cannot be synced.
        """
        assert self._folder is not None
        self.sync()  # the new segment says where this one ends
        segment = self._folder.segment(version, self._journal) if self._recorded else None
        if self._journal is not None:
            self._bytes_before += self._journal.bytes
            self._journal.close()
        self._journal = segment
        self._heard = {}

    def resume(self, version: int, now: float, progress: float) -> None:
        """Continue the journal after a recovery."""
        assert self._folder is not None
        self._journal = self._folder.journal() if self._recorded else None
        self._bytes_before = self._folder.bytes_before
        if not self._recorded:
            self.version = version
        self._last = version, now, progress

    @property
    def journal_bytes(self) -> int:
        """Bytes of the journal since the last whole checkpoint, which the next server has to read."""
        return self._bytes_before + self._segment_bytes

    @property
    def _segment_bytes(self) -> int:
        return 0 if self._journal is None else self._journal.bytes

    # ---- records

    def stop(self) -> None:
        """Accept no records from now on: the next server continues from what is written."""
        self._stopped = True

    def _check(self) -> None:
        """Raises JournalError."""
        if self._stopped:
            raise JournalError("the server is stopping, and may come back; try again")

    def _append(self, what: str, fields: Mapping[str, Any], data: Sequence[Bytes] = ()) -> None:
        self._check()
        if self._journal is not None:
            with self._promising():
                self._journal.append(what, fields, data)

    def sync(self) -> None:
        """Sync the last records, before anything leaves that follows from them. Raises JournalError."""
        if self._journal is not None:
            with self._promising():
                self._journal.sync()

    @contextmanager
    def _promising(self) -> Generator[None]:
        try:
            yield
        except JournalError as error:
            self.broken(str(error))
            raise

    def leases(self, core: Core, event: e.Event[Any]) -> dict[str, float]:
        """Return, for a tick, when members were last heard, as far as that is not recorded."""
        if self._journal is None or not isinstance(event, e.Tick):
            return {}
        heard = {worker: member.heard_at for worker, member in core.roster.members.items()}
        return {worker: at for worker, at in heard.items() if self._heard.get(worker) != at}

    def event(
        self, event: e.Event[Any], now: float, result: e.Result[Any], leases: Mapping[str, float]
    ) -> None:
        """Record an event. leases: as `leases` returned before the event. Raises JournalError."""
        alive = isinstance(event, e.KeepAlive) and event.activity is None
        if alive or isinstance(event, _NOT_RECORDED):
            return
        self._check()
        if self._journal is None:
            return
        if isinstance(event, e.Pushed) and isinstance(result.reply, e.Decided) and result.reply.repeated:
            return
        fields: dict[str, Any] = {"now": now, "event": event}
        if isinstance(event, e.Tick):
            if not leases and not result.actions:
                return
            fields["heard"] = dict(leases)
            self._heard.update(leases)
        self._append(EVENT, fields)
        if result.actions or isinstance(event, e.Pushed | e.Initialized | e.Joined):
            self.sync()

    def part(
        self,
        member: Member,
        part: m.PartHeader,
        checksum: int,
        payloads: Iterable[Payload],
        *,
        carried: bool = False,
    ) -> None:
        """Record a part before it is stored. carried: from the previous segment. Raises JournalError."""
        header = encode_worker(part)
        fields = {"member": member, "header": header, "checksum": checksum, "carried": carried}
        self._append(PART, fields, [payload.data for payload in payloads])

    def closed(self, member: Member, seq: int, refusal: Refusal | None, *, again: bool) -> None:
        """Record that a push is over without control. again: the worker sends all of its parts again."""
        self._append(CLOSED, {"member": member, "seq": seq, "refusal": refusal, "again": again})

    def unwanted(self, member: Member, seq: int, assignment: int) -> None:
        """Record that the server does not need the parts of a push, which answers an assignment."""
        self._append(UNWANTED, {"member": member, "seq": seq, "assignment": assignment})

    def plan(self, plan: bytes) -> None:
        """Record that the shard has prepared a plan."""
        self._append(PLAN, {"plan": plan})

    def buffers(self, member: Member, seq: int, collection: int, values: Mapping[str, Bytes]) -> None:
        """Record the buffers that belong to a push."""
        sizes = {name: int(each.size) for name, each in values.items()}
        fields = {"member": member, "seq": seq, "collection": collection, "sizes": sizes}
        self._append(BUFFERS, fields, list(values.values()))

    def evaluated(self, epoch: int, values: Mapping[str, Bytes]) -> None:
        """Record the buffers with which an epoch is evaluated."""
        sizes = {name: int(each.size) for name, each in values.items()}
        self._append(EVALUATED, {"epoch": epoch, "sizes": sizes}, list(values.values()))

    # ---- checkpoints

    def due(self, version: int, now: float, progress: float) -> bool:
        """Return whether a checkpoint is due at a version. progress: epochs so far. Raises JournalError if
        checkpoints fail and the journal has reached its limit."""
        self._check_limit()
        if self._every is None or self._writing is not None or now < self._retry_at:
            return False
        steps, at, epochs = self._last
        passed = {"steps": version - steps, "seconds": now - at, "epochs": progress - epochs}
        long = passed[self._every.unit] >= self._every.number
        return (long or self._segment_bytes > segment_limit(self.bytes)) and not self._begins_at(version)

    def _check_limit(self) -> None:
        """Raises JournalError if checkpoints fail and the journal would grow without bound."""
        limit = journal_limit(self.bytes)
        if self._journal is None or not self.failing or self.journal_bytes <= limit:
            return
        why = (
            f"{self.failing}, and the journal since the last one has {self.journal_bytes / 1e6:.0f} MB, "
            f"which is more than {limit / 1e6:.0f}. Nothing is lost: make room, or have the folder writable, "
            "and start gc-server with the same --state"
        )
        self.broken(why)
        raise JournalError(why)

    def _begins_at(self, version: int) -> bool:
        """Return whether the segment begins at a version already. A second one would replace it, and lose its
        records, before the checkpoint of the version is whole. So would a second checkpoint without a
        journal."""
        if self._folder is None:
            return False
        if self._journal is None:
            return not self._recorded and self.version == version
        return self._journal.path == self._folder.segment_path(version)

    async def idle(self) -> None:
        """Return once no checkpoint is being written."""
        if self._writing is not None:
            await asyncio.shield(self._writing)

    def checkpoint(
        self, version: int, tree: Any, stored: Iterable[Stored], now: float, progress: float
    ) -> asyncio.Task[None]:
        """Begin a new segment with the stored parts of open pushes, and start to write the tree. Only sync if
        the segment begins at this version: it and those before it lead here. Raises JournalError."""
        if self._begins_at(version):
            self.sync()
            return asyncio.create_task(self.idle())
        self._last = version, now, progress
        try:
            self.begin(version)
        except OSError as error:
            self._retry_at = now + RETRY_S
            self._writing = asyncio.create_task(self._write(version, tree, error))
            return self._writing
        for member, part, checksum, payloads in stored:
            self.part(member, part, checksum, payloads, carried=True)
        self._writing = asyncio.create_task(self._write(version, tree))
        return self._writing

    async def first(self, tree: Any, now: float) -> None:
        """Write the checkpoint of version 0. Raises OSError."""
        self.begin(0)
        self._last = 0, now, 0.0
        await self._be_patient(tree)
        try:
            await asyncio.wait_for(self.write(0, tree), self.patience_s)
        except TimeoutError:
            raise OSError(f"no answer within {self.patience_s:.0f} s") from None

    async def _be_patient(self, tree: Any) -> None:
        """Set `patience_s` by the size of a tree."""
        self.patience_s = PATIENCE_S + await asyncio.to_thread(checkpoint.size, tree) / SLOWEST_BYTES_PER_S

    async def write(self, version: int, tree: Any) -> None:
        """Write a checkpoint. Raises OSError."""
        assert self._folder is not None
        about = {"job": self._job, "version": version}
        self.bytes = await apart(self._folder.write, version, tree, about)
        self.version, self._bytes_before = version, 0

    async def write_best(self, version: int, tree: Any) -> None:
        """Write what a job needs to begin with the best version, in place of the previous one. Raises
        OSError."""
        assert self._folder is not None
        about = {"job": self._job, "version": version}
        await apart(self._folder.write_best, version, tree, about)

    async def _write(self, version: int, tree: Any, segment: OSError | None = None) -> None:
        """Write a checkpoint and log how that went. segment: why its segment could not begin, if so."""
        try:
            if segment is not None:
                raise segment
            await self._be_patient(tree)
            writing = asyncio.ensure_future(self.write(version, tree))
            if not (await asyncio.wait({writing}, timeout=self.patience_s))[0]:
                why = f"is not written after {self.patience_s:.0f} s"
                self._failed(version, why, "none other is begun before it is, and training goes on")
            await writing
        except Exception as error:
            then = "the one before it and the journal stay, and the next is tried when it is due"
            self._failed(version, f"could not be written: {error}", then)
        else:
            if self.failing:
                log.info("checkpoints can be written again")
            self.failing = ""
            log.info("checkpoint of version %d written, %.1f MB", version, self.bytes / 1e6)
        finally:
            self._writing = None

    def _failed(self, version: int, why: str, then: str) -> None:
        self.failures += 1
        self.failing = f"the checkpoint of version {version} {why}"
        log.error("%s; %s", self.failing, then)

    async def close(self) -> None:
        """Wait for a checkpoint that is being written, unless that hangs, and close all files."""
        if self._writing is not None:
            await asyncio.wait({self._writing}, timeout=self.patience_s)
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        if self._folder is not None:
            self._folder.close()


def apart(function: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
    """Call a function on a thread of its own, for which the end of the process does not wait."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def tell(set_to: Callable[[Any], None], value: Any) -> None:
        if not future.done():
            set_to(value)

    def run() -> None:
        outcome: tuple[Callable[[Any], None], Any]
        try:
            outcome = future.set_result, function(*arguments)
        except BaseException as error:
            outcome = future.set_exception, error
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(tell, *outcome)

    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    return future
