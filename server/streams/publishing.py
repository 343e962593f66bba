"""Sends each worker the messages that take its replica to a version: the update that grows part by part, the
updates that the worker has missed, or a snapshot; and the plan, before anything that goes by it."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from ...proto.plans import plan_message
from ...proto.wire import encode_server
from ..shard.shard import Shard
from ..shard.store import Encoded
from .outbox import WorkerStream
from .updates import Broadcast


class Publishing:
    """Keeps the last updates and the snapshot of the current version. Belongs to the conductor's loop."""

    def __init__(
        self,
        shard: Shard,
        streams: Mapping[str, WorkerStream],
        *,
        work: Callable[[Awaitable[None]], None],
    ) -> None:
        """
        Args:
            streams: of the workers that are connected, at any time.
            work: sees to what takes time.
        """
        self._shard, self._streams, self._work = shard, streams, work
        self._updates: deque[Broadcast] = deque()  # the last
        self._growing: Broadcast | None = None  # to the version that the open round leads to
        self._snapshot: Broadcast | None = None  # of the current version

    # ---- one worker

    def divide(self, stream: WorkerStream) -> None:
        """Send a worker the plan, if it does not have it, before anything that goes by it."""
        plan = self._shard.reported.plan
        if stream.plan != plan.number:
            stream.plan = plan.number
            stream.outbox.put(encode_server(plan_message(plan)))

    def update(self, stream: WorkerStream, version: int, has: int | None) -> None:
        """Send a worker what takes its replica from `has` to `version`."""
        self.divide(stream)
        *missed, last = self._broadcasts(version, has)
        for broadcast in missed:  # uncompressed, the last alone would have done
            stream.outbox.broadcast(broadcast, counted=False)
        stream.outbox.broadcast(last)

    def _broadcasts(self, version: int, has: int | None) -> Sequence[Broadcast]:
        """Return the updates that take a replica from `has` to `version`, or a snapshot."""
        updates: list[Broadcast] = []
        for update in reversed(self._updates):
            if update.version != version - len(updates):
                break
            updates.append(update)
            if update.whole or update.version - 1 == has:
                return updates[::-1]
        if self._snapshot is None:
            # The shard keeps the order of what it is asked: before the next apply, so it is of this version.
            self._snapshot = Broadcast(version)
            self._work(self._take_snapshot(self._snapshot, self._shard.snapshot()))
        return [self._snapshot]

    async def _take_snapshot(self, snapshot: Broadcast, parts: Awaitable[Sequence[Encoded]]) -> None:
        snapshot.finish(await parts)

    def _follow(self, worker: str, update: Broadcast) -> None:
        """Have a worker sent an update while it grows."""
        stream = self._streams.get(worker)
        if stream is not None and stream.following is not update:
            stream.following = update
            self.divide(stream)
            stream.outbox.broadcast(update)

    # ---- the course of versions

    def open(self, version: int, workers: Iterable[str]) -> Broadcast:
        """Parts of the update to a version go out as soon as they are there, to these. Returns it, empty."""
        self._give_up()
        self._growing = Broadcast(version, last_first=bool(self._shard.reported.plan.turns))
        for worker in workers:
            self._follow(worker, self._growing)
        return self._growing

    def close(self, version: int, workers: Iterable[str]) -> Broadcast:
        """Control has decided which pushes a version contains. Return its update, which goes to these workers
        too, and may have some parts."""
        growing, self._growing = self._growing, None
        broadcast = growing if growing is not None else Broadcast(version)
        for worker in workers:
            self._follow(worker, broadcast)
        return broadcast

    def published(self, update: Broadcast) -> None:
        """A version is complete. Keep its update for those that missed it, as long as a snapshot would not be
        smaller."""
        self._snapshot = None
        updates = self._updates
        if update.whole:
            updates.clear()
        updates.append(update)
        while len(updates) > 1 and sum(each.wire_bytes for each in updates) > update.raw_bytes:
            updates.popleft()

    def replaced(self) -> None:
        """The parameters are others, or of another version, without an update."""
        self._snapshot = None

    def conclude(self, version: int, members: Iterable[tuple[WorkerStream, int | None]]) -> None:
        """There is a new plan: take members to the version from those that they have. What is of the old plan
        serves nobody after that: those that missed it get a snapshot."""
        self._give_up()
        for stream, has in members:
            if has != version:
                self.update(stream, version, has)
        self._updates.clear()
        self._snapshot = None

    def _give_up(self) -> None:
        """The round of an update that still grows was given up before it had any."""
        if self._growing is not None:
            self._growing.finish()
            self._growing = None
