"""The recorder writes the journal and the checkpoints of a running server: events that control has processed,
stored parts, and from time to time a checkpoint, after which the journal begins a new segment.

A recovery (`server/recovery`) reads them. An event is recorded after control has decided and before any of
its actions is performed. A part is recorded before the shard has it. Consequences are not recorded: stepped
parts, the content of versions, updates. Nor are keep-alives without an activity. Instead a tick, which ends
leases, has the time at which each member was last heard. Times are those of the job's own clock, which stands
still while no server runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
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

RETRY_S = 30.0  # interval until the next try, if the segment of a checkpoint could not be begun

T = TypeVar("T")
Member = tuple[str, int]
Stored = tuple[Member, m.PartHeader, int, Sequence[Payload]]  # sender and header of a part, crc32c, content

EVENT, PART, CLOSED, UNWANTED, PLAN = "event", "part", "closed", "unwanted", "plan"
BUFFERS, EVALUATED = "buffers", "evaluated"
# Events that follow from other records, or change nothing that is saved.
_NOT_RECORDED = (e.ApplyStarted, e.PauseRequested, e.Stopping)
# Seconds after which a backend that writes a checkpoint counts as hanging, and the speed from which the
# seconds that its size adds are computed.
PATIENCE_S, SLOWEST_BYTES_PER_S = 60.0, 1e6


class Recorder:
    """Writes the journal and the checkpoints. It belongs to the conductor's event loop.

    It writes nothing without a folder (the job ends with its server), before `first`, and during a recovery.

    Attributes:
        broken: function called with the reason when the journal cannot be written any more. The server has to
            end; workers wait for the next server, which continues the job.
        failing: reason for which the last checkpoint could not be written; empty if it could.
        failures: number of checkpoints that could not be written.
        bytes: size of the last checkpoint; 0 before the first.
        written_at: time of the last checkpoint, in seconds since the epoch; NaN before this process wrote
        version: version of the last checkpoint. It is None until this process has written one, unless it
            resumed from a folder without a journal.
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
            folder: folder of --state; None if the job ends with its server.
            every: length of training after which a checkpoint is due; None for none but the first.
            recorded: True if there is a journal between checkpoints."""
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
        self.written_at = math.nan
        self.version: int | None = None

    @property
    def _held(self) -> StateFolder:
        assert self._folder is not None, "the job ends with its server"
        return self._folder

    @property
    def keeps(self) -> bool:
        """True if the job outlives its server: there is a folder."""
        return self._folder is not None

    def begin(self, version: int) -> None:
        """Begin the journal's segment for a checkpoint of `version`, before that checkpoint is written.
        Raises OSError if the segment could not be begun, and the previous one continues."""
        self.sync()  # the first record of the new segment names the end of this one
        segment = self._held.segment(version, self._journal) if self._recorded else None
        if self._journal is not None:
            self._bytes_before += self._journal.bytes
            self._journal.close()
        self._journal = segment
        self._heard = {}

    def resume(self, version: int, now: float, progress: float) -> None:
        """Continue the journal after a recovery, at a version, a time of the job's clock and a number of
        epochs."""
        self._journal = self._held.journal() if self._recorded else None
        self._bytes_before = self._held.bytes_before
        if not self._recorded:
            self.version = version
        self._last = version, now, progress

    @property
    def journal_bytes(self) -> int:
        """Bytes of the journal since the last whole checkpoint, which the next server would have to read."""
        return self._bytes_before + self._segment_bytes

    @property
    def _segment_bytes(self) -> int:
        return 0 if self._journal is None else self._journal.bytes

    # ---- records

    def stop(self) -> None:
        """Refuse all further records: the next server continues from those that are written."""
        self._stopped = True

    def _check(self) -> None:
        """Raise JournalError if the recorder was stopped."""
        if self._stopped:
            raise JournalError("the server is stopping and may return; try again")

    def _append(self, kind: str, fields: Mapping[str, Any], data: Sequence[Bytes] = ()) -> None:
        self._check()
        if self._journal is not None:
            with self._promising():
                self._journal.append(kind, fields, data)

    def sync(self) -> None:
        """Wait until all records are on the disk, before anything leaves the server that follows from them.
        Raises JournalError if they may not be."""
        if self._journal is not None:
            with self._promising():
                self._journal.sync()

    @contextmanager
    def _promising(self) -> Generator[None]:
        """Call `broken` if the block raises JournalError."""
        try:
            yield
        except JournalError as error:
            self.broken(str(error))
            raise

    def leases(self, core: Core, event: e.Event[Any]) -> dict[str, float]:
        """Return the last-heard times of members that the journal does not have yet, by worker id, for
        `event`. Call it before control processes the event. Empty unless that is a tick, because only a tick
        ends leases."""
        if self._journal is None or not isinstance(event, e.Tick):
            return {}
        heard = {worker: member.heard_at for worker, member in core.state.roster.members.items()}
        return {worker: at for worker, at in heard.items() if self._heard.get(worker) != at}

    def event(
        self, event: e.Event[Any], now: float, result: e.Result[Any], leases: Mapping[str, float]
    ) -> None:
        """Record an event that control has processed, before its actions are performed.

        Args:
            event: the event. Events that change no saved state are left out.
            now: time of the event, in seconds of the job's clock.
            result: reply and actions of control.
            leases: result of `leases`, called before the event was processed.

        Raises:
            JournalError: the event could not be recorded.
        """
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
        """Record a part of a push, before the shard stores it.

        Args:
            checksum: crc32c of the part's bytes.
            carried: True if the part is copied from the previous segment.

        Raises:
            JournalError: the part could not be recorded.
        """
        header = encode_worker(part)
        fields = {"member": member, "header": header, "checksum": checksum, "carried": carried}
        self._append(PART, fields, [payload.data for payload in payloads])

    def closed(self, member: Member, seq: int, refusal: Refusal | None, *, again: bool) -> None:
        """Record that a push has ended without a decision of control.

        Args:
            refusal: reason for which it was refused; None if it was abandoned.
            again: True if the worker sends all of its parts again.
        """
        self._append(CLOSED, {"member": member, "seq": seq, "refusal": refusal, "again": again})

    def unwanted(self, member: Member, seq: int, assignment: int) -> None:
        """Record that the server does not need the parts of a push for an assignment."""
        self._append(UNWANTED, {"member": member, "seq": seq, "assignment": assignment})

    def plan(self, plan: bytes) -> None:
        """Record that the shard has prepared a plan. `plan` is its encoded announcement."""
        self._append(PLAN, {"plan": plan})

    def buffers(self, member: Member, seq: int, collection: int, values: Mapping[str, Bytes]) -> None:
        """Record the buffers that a push carries. values: their bytes, by name."""
        sizes = {name: int(each.size) for name, each in values.items()}
        fields = {"member": member, "seq": seq, "collection": collection, "sizes": sizes}
        self._append(BUFFERS, fields, list(values.values()))

    def evaluated(self, epoch: int, values: Mapping[str, Bytes]) -> None:
        """Record the buffers with which an epoch is evaluated. values: their bytes, by name."""
        sizes = {name: int(each.size) for name, each in values.items()}
        self._append(EVALUATED, {"epoch": epoch, "sizes": sizes}, list(values.values()))

    # ---- checkpoints

    def due(self, version: int, now: float, progress: float) -> bool:
        """Return True if a checkpoint is due at a version, a time of the job's clock and a number of epochs.
        Raises JournalError if checkpoints fail and the journal has reached its limit."""
        self._check_limit()
        if self._every is None or self._writing is not None or now < self._retry_at:
            return False
        steps, at, epochs = self._last
        passed = {"steps": version - steps, "seconds": now - at, "epochs": progress - epochs}
        long = passed[self._every.unit] >= self._every.number
        return (long or self._segment_bytes > segment_limit(self.bytes)) and not self._begins_at(version)

    def _check_limit(self) -> None:
        """Raise JournalError if checkpoints fail and the journal has reached its limit, beyond which it would
        grow without bound."""
        limit = journal_limit(self.bytes)
        if self._journal is None or not self.failing or self.journal_bytes <= limit:
            return
        why = (
            f"{self.failing}, and the journal since the last checkpoint has "
            f"{self.journal_bytes / 1e6:.0f} MB, above its limit of {limit / 1e6:.0f} MB. Nothing is lost: "
            "free disk space, or make the folder writable, and start gc-server with the same --state"
        )
        self.broken(why)
        raise JournalError(why)

    def _begins_at(self, version: int) -> bool:
        """Return True if the segment begins at this version already, so that no checkpoint may be begun.

        A second segment would replace the first, and lose its records before the checkpoint of the version is
        whole. The same holds for a second checkpoint where there is no journal."""
        if self._folder is None:
            return False
        if self._journal is None:
            return not self._recorded and self.version == version
        return self._journal.path == self._folder.segment_path(version)

    async def idle(self) -> None:
        """Wait until no checkpoint is being written."""
        if self._writing is not None:
            await asyncio.shield(self._writing)

    def checkpoint(
        self, version: int, tree: Any, stored: Iterable[Stored], now: float, progress: float
    ) -> asyncio.Task[None]:
        """Begin a new segment with the stored parts of open pushes, and start to write a checkpoint.

        If a segment begins at this version already, only sync: the folder leads to the present state without
        a new checkpoint.

        Args:
            stored: stored parts of open pushes, which the new segment begins with.
            now: time in seconds of the job's clock.
            progress: epochs trained on, with a fraction.

        Returns:
            The task that writes the checkpoint.
        """
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
        """Write the checkpoint of version 0, and begin the journal. Raises OSError if the checkpoint could
        not be written, or not in time. now: time in seconds of the job's clock."""
        self.begin(0)
        self._last = 0, now, 0.0
        await self._be_patient(tree)
        try:
            await asyncio.wait_for(self.write(0, tree), self.patience_s)
        except TimeoutError:
            raise OSError(f"no answer within {self.patience_s:.0f} s") from None

    async def _be_patient(self, tree: Any) -> None:
        """Set `patience_s` by the size of a checkpoint's content."""
        self.patience_s = PATIENCE_S + await asyncio.to_thread(checkpoint.size, tree) / SLOWEST_BYTES_PER_S

    async def write(self, version: int, tree: Any) -> None:
        """Write a checkpoint. Raises OSError."""
        self.bytes = await self._in_folder(self._held.write, version, tree)
        self.version, self._bytes_before = version, 0
        self.written_at = time.time()

    async def write_best(self, version: int, tree: Any) -> None:
        """Write the best version, model and optimizer state, in place of the previous one. Raises OSError."""
        await self._in_folder(self._held.write_best, version, tree)

    def _in_folder(self, write: Callable[..., T], version: int, tree: Any) -> asyncio.Future[T]:
        about = {"job": self._job, "version": version}
        return run_on_daemon_thread(write, version, tree, about)

    async def _write(self, version: int, tree: Any, segment: OSError | None = None) -> None:
        """Write a checkpoint and log the outcome. segment: error for which its segment could not be begun."""
        try:
            if segment is not None:
                raise segment
            await self._be_patient(tree)
            writing = asyncio.ensure_future(self.write(version, tree))
            if not (await asyncio.wait({writing}, timeout=self.patience_s))[0]:
                why = f"is not written after {self.patience_s:.0f} s"
                self._failed(version, why, "the next one begins once it is written; training continues")
            await writing
        except Exception as error:
            then = "the previous checkpoint and the journal stay; the next checkpoint is tried when it is due"
            self._failed(version, f"could not be written: {error}", then)
        else:
            if self.failing:
                log.info("checkpoints can be written again")
            self.failing = ""
            log.info("checkpoint of version %d written, %.1f MB", version, self.bytes / 1e6)
        finally:
            self._writing = None

    def _failed(self, version: int, why: str, then: str) -> None:
        """Count and log a failure. `then` is the consequence, in words."""
        self.failures += 1
        self.failing = f"the checkpoint of version {version} {why}"
        log.error("%s; %s", self.failing, then)

    async def close(self) -> None:
        """Wait for a checkpoint that is being written, unless the backend hangs, then close the journal and
        the folder."""
        if self._writing is not None:
            await asyncio.wait({self._writing}, timeout=self.patience_s)
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        if self._folder is not None:
            self._folder.close()


def run_on_daemon_thread(function: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
    """Call a function on a thread of its own, and return a future of its result. The process may end before
    the thread does."""
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
        with contextlib.suppress(RuntimeError):  # raised if the loop was closed meanwhile
            loop.call_soon_threadsafe(tell, *outcome)

    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    return future
