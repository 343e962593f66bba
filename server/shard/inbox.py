"""What arrives of pushes: parts on one stream and then perhaps on another. No I/O.

An `Inbox` belongs to a stream, and takes the chunks of a few parts at a time: a part of which the turn comes
earlier may go between the chunks of another. `Arrivals` belong to a worker's incarnation, and outlive its
streams: which parts are stored, which pushes are committed. A commit may come before parts that had to be
sent again, so a push is handed on once both are there, and after those before it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from ...compressors import Plan
from ...proto.manifest import Manifest
from ...proto.messages import Chunk, Commit, Part, Stored
from ...proto.refusal import Reason, Refusal, refused
from ...proto.transfer import MAX_ARRIVING, Assembly, digest, part_assembly, part_transfer

MAX_OPEN = 16  # pushes of a worker that have not been decided on
MAX_DROPPING = 1 << 12  # parts of a stream that are remembered as of no use, in case that chunks follow


class Inbox:
    """Assembles up to `MAX_ARRIVING` parts at a time. One that is refused leaves nothing behind; its chunks
    are dropped."""

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self._arriving: dict[int, tuple[Part, Assembly]] = {}  # by transfer
        self._dropping: dict[int, None] = {}  # transfers that are of no use, the last ones
        self._latest = 0  # the transfer of which something has come last
        self._bytes = 0  # that have come since a part was complete
        self._busy: bool | None = None  # whether they came one after the other; None before there are any

    def begin(self, header: Part, manifest: Manifest, plan: Plan) -> None:
        """Take a header. What had arrived of the same part is forgotten: the worker has begun it anew.

        Raises:
            Refused: before anything is allocated.
        """
        self.drop(header)
        what = f"push {header.seq}, part {header.part}"
        if header.plan != plan.number:
            limit, value = f"plan {plan.number}", f"{header.plan}"
            raise refused(Reason.PLAN, worker=self.worker, field=what, limit=limit, value=value)
        if header.part >= len(plan.parts):
            limit, value = f"a part below {len(plan.parts)}", str(header.part)
            raise refused(Reason.PLAN, worker=self.worker, field=what, limit=limit, value=value)
        if len(self._arriving) >= MAX_ARRIVING:
            limit = f"{MAX_ARRIVING} parts on their way at once"
            raise refused(Reason.SIZE, worker=self.worker, field=what, limit=limit, value="one more")
        transfer = part_transfer(header.seq, header.part)
        assembly = part_assembly(
            transfer, header.payloads, plan.parts[header.part], manifest, worker=self.worker
        )
        del self._dropping[transfer]
        self._arriving[transfer], self._latest = (header, assembly), transfer

    def arriving(self, transfer: int) -> Part | None:
        """The part that a chunk belongs to, if it is on its way."""
        found = self._arriving.get(transfer)
        return None if found is None else found[0]

    @property
    def unfinished(self) -> Part | None:
        """A part that is on its way: the one that began first."""
        return next((header for header, _ in self._arriving.values()), None)

    def add(self, chunk: Chunk) -> None:
        """Take a chunk.

        Raises:
            Refused: it does not belong here or is damaged.
        """
        self._bytes += len(chunk.data)
        if chunk.transfer in self._dropping:
            return
        found = self._arriving.get(chunk.transfer)
        if found is None:
            got = f"transfer {chunk.transfer} at offset {chunk.offset}"
            raise refused(
                Reason.CHUNK, worker=self.worker, field="chunk", limit="the header of a part first", value=got
            )
        self._latest = chunk.transfer
        found[1].add(chunk)

    def take(self) -> tuple[Part, Assembly] | None:
        """The part of which something has come last, if it is complete; the inbox has it no more then."""
        found = self._arriving.get(self._latest)
        if found is None or not found[1].complete:
            return None
        return self._arriving.pop(self._latest)

    def since(self) -> tuple[int, bool]:
        """Of a part that was taken: how many bytes have come since the one before, and whether something was
        on its way all the time. What another part had got of the link before it was overtaken is in it."""
        found = self._bytes, bool(self._busy)
        self._bytes, self._busy = 0, True if self._arriving else None
        return found

    def drop(self, header: Part) -> None:
        """Forget what has arrived of a part, and ignore the rest of it."""
        if self._busy is None:
            self._busy = header.waited
        self._drop(part_transfer(header.seq, header.part))

    def drop_push(self, seq: int) -> None:
        """The same of all parts of a push that are on their way."""
        for transfer, (header, _) in list(self._arriving.items()):
            if header.seq == seq:
                self._drop(transfer)

    def _drop(self, transfer: int) -> None:
        self._arriving.pop(transfer, None)
        self._dropping[transfer] = None
        while len(self._dropping) > MAX_DROPPING:
            del self._dropping[next(iter(self._dropping))]


@dataclass(slots=True)
class _Push:
    """assignment: that it answers, 0 before a part has come. checksums: of its stored parts, by part.
    unwanted: its parts are of no use any more. rates: learning rates of its parts; None before one has
    come."""

    assignment: int = 0
    rates: tuple[float, ...] | None = None
    checksums: dict[int, int] = field(default_factory=dict[int, int])
    commit: Commit | None = None
    unwanted: bool = False


class Arrivals:
    """Of one incarnation of a worker. `through`: all pushes up to this seq are over, but for those that are
    open: a later one may be abandoned or refused while parts of an earlier one are sent again."""

    def __init__(self, worker: str, through: int) -> None:
        self.worker = worker
        self.through = through
        self._open: dict[int, _Push] = {}
        self._refused: dict[int, Refusal] = {}  # the last

    def image(self) -> dict[str, Any]:
        """All of it, as values that nobody changes."""
        return {"through": self.through, "open": deepcopy(self._open), "refused": dict(self._refused)}

    def restore(self, image: Mapping[str, Any]) -> None:
        """Go on from an `image`."""
        self.through, self._open, self._refused = image["through"], image["open"], image["refused"]

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

    def over(self, seq: int) -> bool:
        """Whether a push has been decided on, abandoned or refused."""
        return seq <= self.through and seq not in self._open

    def refusal(self, seq: int) -> Refusal | None:
        """Why a push was refused before it could be decided on."""
        return self._refused.get(seq)

    def wants(self, seq: int, part: int, assignment: int) -> bool:
        """Whether a part is of use, of a push that answers this assignment. Raises Refused for one push too
        many."""
        if self.over(seq):
            return False
        push = self._push(seq)
        push.assignment = assignment
        return part not in push.checksums and not push.unwanted

    def check_rates(self, part: Part, groups: int) -> None:
        """Raise Refused for learning rates of a part that there cannot be, or others than the first part of
        its push had. groups: of parameters, in the model."""
        push, rates = self._open.get(part.seq), part.learning_rates
        if push is None or rates == push.rates:
            return
        field = f"push {part.seq}, part {part.part} learning_rates"
        limit, value = "", str(rates)
        if push.rates is not None:
            limit = f"those of the push's other parts, {push.rates}"
        elif rates and len(rates) != groups:
            limit, value = f"{groups}, one for each parameter group, or none", str(len(rates))
        elif not all(0 <= rate < math.inf for rate in rates):
            limit = "finite numbers of at least 0"
        if limit:
            raise refused(Reason.GROUP, worker=self.worker, field=field, limit=limit, value=value)
        push.rates = rates

    def rates(self, seq: int) -> tuple[float, ...]:
        """That came with the parts of an open push; none for those of the job."""
        push = self._open.get(seq)
        return () if push is None or push.rates is None else push.rates

    def store(self, seq: int, part: int, checksum: int) -> bool:
        """A part is valid and stored. Returns False if it is not needed any more."""
        push = self._open.get(seq)
        if push is None or push.unwanted:
            return False
        push.checksums[part] = checksum
        return True

    def commit(self, commit: Commit) -> None:
        """Take a commit of a push that is not over. Raises Refused for one push too many."""
        push = self._push(commit.seq)
        push.commit, push.assignment = commit, commit.assignment

    @property
    def coming(self) -> dict[int, int]:
        """Pushes of which parts come and a commit has not, with the assignments that they answer."""
        return {seq: each.assignment for seq, each in self._open.items() if each.commit is None}

    def give_up(self, seq: int) -> None:
        """The parts of a push are of no use: its commit is handed on without them."""
        push = self._push(seq)
        push.checksums.clear()
        push.unwanted = True

    def unwanted(self, seq: int) -> bool:
        """Whether the parts of a push are of no use."""
        return seq in self._open and self._open[seq].unwanted

    def assignment(self, seq: int) -> int:
        """That an open push answers; 0 of one that is over."""
        return self._open[seq].assignment if seq in self._open else 0

    def checksum(self, seq: int, part: int) -> int:
        """Of a part that is stored of an open push; 0 of one that is over."""
        return self._open[seq].checksums.get(part, 0) if seq in self._open else 0

    def close(self, seq: int, refusal: Refusal | None = None) -> None:
        """The push has been decided on, abandoned, or refused as a whole."""
        self._open.pop(seq, None)
        self.through = max(self.through, seq)
        if refusal is not None:
            self._refused[seq] = refusal
            while len(self._refused) > MAX_OPEN:
                del self._refused[next(iter(self._refused))]

    def _push(self, seq: int) -> _Push:
        if seq not in self._open and len(self._open) >= MAX_OPEN:
            limit = f"{MAX_OPEN} open pushes"
            raise refused(Reason.SIZE, worker=self.worker, field=f"push {seq}", limit=limit, value="one more")
        return self._open.setdefault(seq, _Push())

    def forget(self, seq: int) -> None:
        """All parts of the push have to come again."""
        self._open[seq] = _Push(self._open[seq].assignment)

    def forget_parts(self) -> None:
        """What is stored is of no use any more; commits stay."""
        for push in self._open.values():
            push.checksums.clear()

    def next(self, plan: int) -> tuple[Commit, frozenset[int]] | None:
        """The first open push with its parts, if it is committed and all of them are stored. An unwanted one,
        or one of another plan than the present one, has no use for any.

        Raises:
            Refused: what is stored is not what was committed.
        """
        if not self._open:
            return None
        seq = min(self._open)
        push = self._open[seq]
        older = push.commit is not None and push.commit.parts and push.commit.plan != plan
        if push.commit is not None and (push.unwanted or older):
            return push.commit, frozenset()
        if push.commit is None or len(push.checksums) < push.commit.parts:
            return None
        if digest(push.checksums) != push.commit.digest or len(push.checksums) != push.commit.parts:
            limit, value = f"{push.commit.parts} parts with digest {push.commit.digest:08x}", "others"
            field = f"push {seq}"
            raise refused(Reason.CHECKSUM, worker=self.worker, field=field, limit=limit, value=value)
        return push.commit, frozenset(push.checksums)
