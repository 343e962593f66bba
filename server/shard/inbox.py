"""What arrives of pushes: part after part, on one stream and then perhaps on another. No I/O.

An `Inbox` belongs to a stream, and takes the chunks of one part after the other. `Arrivals` belong to a
worker's
incarnation, and outlive its streams: which parts are stored, which pushes are committed. A commit may come
before parts that had to be sent again, so a push is handed on once both are there, and after those before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ...compressors import Plan
from ...proto.manifest import Manifest
from ...proto.messages import Chunk, Commit, Outcome, Part, Stored
from ...proto.refusal import Reason, refused
from ...proto.transfer import PLAN, Assembly, digest, part_assembly, part_transfer

MAX_OPEN = 16  # pushes of a worker that have not been decided on


class Inbox:
    """Assembles one part at a time. One that is refused leaves nothing behind; its chunks are dropped."""

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self.current: Part | None = None  # the part that is arriving
        self._assembly: Assembly | None = None
        self._dropping: int | None = None  # transfer that is of no use

    def begin(self, header: Part, manifest: Manifest, plan: Plan) -> None:
        """Take a header. A part that was arriving is forgotten: the worker has begun anew.

        Raises:
            Refused: before anything is allocated.
        """
        self.drop(header)
        what = f"push {header.seq}, part {header.part}"
        if header.plan != PLAN:
            raise refused(
                Reason.PLAN, worker=self.worker, field=what, limit=f"plan {PLAN}", value=f"{header.plan}"
            )
        if header.part >= len(plan.parts):
            limit, value = f"a part below {len(plan.parts)}", str(header.part)
            raise refused(Reason.PLAN, worker=self.worker, field=what, limit=limit, value=value)
        transfer = part_transfer(header.seq, header.part)
        self._assembly = part_assembly(
            transfer, header.payloads, plan.parts[header.part], manifest, worker=self.worker
        )
        self.current, self._dropping = header, None

    def add(self, chunk: Chunk) -> None:
        """Take a chunk.

        Raises:
            Refused: it does not belong here or is damaged.
        """
        if self._dropping == chunk.transfer:
            return
        if self._assembly is None:
            got = f"transfer {chunk.transfer} at offset {chunk.offset}"
            raise refused(
                Reason.CHUNK, worker=self.worker, field="chunk", limit="the header of a part first", value=got
            )
        self._assembly.add(chunk)

    def take(self) -> tuple[Part, Assembly] | None:
        """The part, if it is complete; the inbox is empty again then."""
        if self.current is None or self._assembly is None or not self._assembly.complete:
            return None
        complete = self.current, self._assembly
        self.current = self._assembly = None
        return complete

    def drop(self, header: Part) -> None:
        """Forget what has arrived, and ignore the rest of this part."""
        self.current = self._assembly = None
        self._dropping = part_transfer(header.seq, header.part)


@dataclass(slots=True)
class _Push:
    """checksums: of its stored parts, by part."""

    checksums: dict[int, int] = field(default_factory=dict[int, int])
    commit: Commit | None = None


class Arrivals:
    """Of one incarnation of a worker. `through`: all pushes up to this seq have been decided on or
    abandoned. `refused`: the last ones that were not decided on, because something in them was not valid."""

    def __init__(self, worker: str, through: int) -> None:
        self.worker = worker
        self.through = through
        self.refused: dict[int, Outcome] = {}
        self._open: dict[int, _Push] = {}

    @property
    def stored(self) -> tuple[Stored, ...]:
        """What need not be sent again."""
        return tuple(
            Stored(seq=seq, parts=tuple(sorted(push.checksums))) for seq, push in sorted(self._open.items())
        )

    @property
    def open(self) -> Iterable[int]:
        """Pushes of which something has come."""
        return list(self._open)

    def wants(self, seq: int, part: int) -> bool:
        """Whether a part is of use. Raises Refused for one push too many."""
        if seq <= self.through:
            return False
        if seq not in self._open and len(self._open) >= MAX_OPEN:
            limit = f"{MAX_OPEN} open pushes"
            raise refused(Reason.SIZE, worker=self.worker, field=f"push {seq}", limit=limit, value="one more")
        return part not in self._open.setdefault(seq, _Push()).checksums

    def store(self, seq: int, part: int, checksum: int) -> bool:
        """A part is valid and stored. Returns False if it is not needed any more."""
        push = self._open.get(seq)
        if push is None:
            return False
        push.checksums[part] = checksum
        return True

    def commit(self, commit: Commit) -> None:
        """Take a commit of a push that has not been decided on."""
        self._open.setdefault(commit.seq, _Push()).commit = commit

    def close(self, seq: int) -> None:
        """The push has been decided on, or abandoned."""
        self._open.pop(seq, None)
        self.through = max(self.through, seq)

    def refuse(self, outcome: Outcome) -> None:
        """Close a push, and remember why."""
        self.close(outcome.seq)
        self.refused[outcome.seq] = outcome
        if len(self.refused) > MAX_OPEN:
            del self.refused[min(self.refused)]

    def forget(self, seq: int) -> None:
        """All parts of the push have to come again."""
        self._open[seq] = _Push()

    def next(self) -> tuple[Commit, frozenset[int]] | None:
        """The first open push with its parts, if it is committed and all of them are stored.

        Raises:
            Refused: what is stored is not what was committed.
        """
        if not self._open:
            return None
        seq = min(self._open)
        push = self._open[seq]
        if push.commit is None or len(push.checksums) < push.commit.parts:
            return None
        if digest(push.checksums) != push.commit.digest or len(push.checksums) != push.commit.parts:
            limit, value = f"{push.commit.parts} parts with digest {push.commit.digest:08x}", "others"
            field = f"push {seq}"
            raise refused(Reason.CHECKSUM, worker=self.worker, field=field, limit=limit, value=value)
        return push.commit, frozenset(push.checksums)
