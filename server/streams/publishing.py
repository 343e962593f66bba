"""Sends each worker the messages that bring its replica to a version: growing updates part by part, missed
updates, or a snapshot. Sends a plan before any message that depends on it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from weakref import ReferenceType, ref

from ...proto.plans import plan_message
from ...proto.wire import encode_server
from ..shard.shard import Shard
from ..shard.store import Encoded
from .outbox import WorkerStream
from .updates import Broadcast


class Publishing:
    """The last updates and the snapshot of the current version, and their delivery to workers. The conductor
    owns it, on its event loop."""

    def __init__(
        self,
        shard: Shard,
        streams: Mapping[str, WorkerStream],
        *,
        work: Callable[[Awaitable[None]], None],
    ) -> None:
        """
        Args:
            streams: streams of the connected workers, by worker; it changes as they connect.
            work: runs an awaitable in the background, and handles its failure."""
        self._shard, self._streams, self._work = shard, streams, work
        self._updates: deque[Broadcast] = deque()  # the last ones, ascending by version
        self._growing: Broadcast | None = None  # the update to the open round's version
        # Of the current version, while it is sent to some worker: it holds the shard's memory.
        self._snapshot: ReferenceType[Broadcast] | None = None

    # ---- one worker

    def send_plan_if_stale(self, stream: WorkerStream) -> None:
        """Send a worker the plan in force, unless it has that plan."""
        plan = self._shard.reported.plan
        if stream.plan != plan.number:
            stream.plan = plan.number
            stream.outbox.put(encode_server(plan_message(plan)))

    def update(self, stream: WorkerStream, version: int, has: int | None) -> None:
        """Send a worker the messages that bring its replica from one version to another.

        Args:
            version: version to bring the replica to.
            has: version of the replica; None without one.
        """
        self.send_plan_if_stale(stream)
        *missed, last = self._broadcasts(version, has)
        for broadcast in missed:  # only compressed updates: without compression, the last alone is enough
            stream.outbox.broadcast(broadcast, counted=False)
        stream.outbox.broadcast(last)

    def _broadcasts(self, version: int, has: int | None) -> Sequence[Broadcast]:
        """Return the updates that bring a replica from version `has` to `version`, in order; a snapshot if
        they are not kept."""
        updates: list[Broadcast] = []
        for update in reversed(self._updates):
            if update.version != version - len(updates):
                break
            updates.append(update)
            if update.whole or update.version - 1 == has:
                return updates[::-1]
        snapshot = None if self._snapshot is None else self._snapshot()
        if snapshot is None:
            # The shard answers in order: this read precedes the next `apply`, so it returns this version.
            snapshot = Broadcast(version)
            self._snapshot = ref(snapshot)
            self._work(self._take_snapshot(snapshot, self._shard.snapshot()))
        return [snapshot]

    async def _take_snapshot(self, snapshot: Broadcast, parts: Awaitable[Sequence[Encoded]]) -> None:
        """Complete the snapshot with its parts once the shard has read them."""
        snapshot.finish(await parts)

    def _follow(self, worker: str, update: Broadcast) -> None:
        """Send a worker an update while the update grows, unless it is already being sent."""
        stream = self._streams.get(worker)
        if stream is not None and stream.following is not update:
            stream.following = update
            self.send_plan_if_stale(stream)
            stream.outbox.broadcast(update)

    # ---- the course of versions

    def open(self, version: int, workers: Iterable[str]) -> Broadcast:
        """Return a new, empty update. Its parts are sent to these workers as soon as they are added. workers:
        ids of the workers to send it to; those that are not connected are skipped."""
        self._end_growing()
        self._growing = Broadcast(version, last_first=bool(self._shard.reported.plan.turns))
        for worker in workers:
            self._follow(worker, self._growing)
        return self._growing

    def close(self, version: int, workers: Iterable[str], versions: Iterable[int | None]) -> Broadcast:
        """Return the update to a version whose pushes control has decided: the growing one from `open`, or
        else a new one. Drop the updates that all members have.

        Args:
            workers: ids of the workers to send it to, unless they already receive it.
            versions: as for `published`.
        """
        self._drop(versions)
        growing, self._growing = self._growing, None
        broadcast = growing if growing is not None else Broadcast(version)
        for worker in workers:
            self._follow(worker, broadcast)
        return broadcast

    def published(self, update: Broadcast, versions: Iterable[int | None]) -> None:
        """Keep the complete update of the newest version for workers that missed it. Drop older updates that
        no member needs, and those that are larger together than a snapshot.

        versions: versions of the members' replicas; None without one, 0 for a member that is away."""
        self._snapshot = None
        updates = self._updates
        if update.whole:
            updates.clear()
        updates.append(update)
        self._drop(versions, keep=1)
        while len(updates) > 1 and sum(each.wire_bytes for each in updates) > update.raw_bytes:
            updates.popleft()

    def _drop(self, versions: Iterable[int | None], *, keep: int = 0) -> None:
        """Drop the updates that all members have, but keep the last `keep`."""
        oldest = min((each for each in versions if each is not None), default=math.inf)
        while len(self._updates) > keep and self._updates[0].version <= oldest:
            self._updates.popleft()

    def drop_snapshot(self) -> None:
        """Drop the snapshot, because the parameters or their version have changed without an update."""
        self._snapshot = None

    def finish_plan(self, version: int, members: Iterable[tuple[WorkerStream, int | None]]) -> None:
        """Update members to a version, before a new plan comes into force, and drop the updates of the old
        plan. Workers that missed those get a snapshot. members: stream of each connected member, and the
        version of its replica; None without one."""
        self._end_growing()
        for stream, has in members:
            if has != version:
                self.update(stream, version, has)
        self._updates.clear()
        self._snapshot = None

    def _end_growing(self) -> None:
        """End the growing update whose round was given up before it had parts."""
        if self._growing is not None:
            self._growing.finish()
            self._growing = None
