"""Building blocks of the random histories of jobs: a small model, pushes as they travel, and workers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from pushes import cut_plan, dense

from gradwire.common.parts import Plan
from gradwire.proto.messages import Abandon, Assignment, Chunk, Commit, PartHeader, Tensor
from gradwire.proto.transfer import part_transfer, payload_header
from gradwire.proto.wire import crc32c
from gradwire.server.job import events as e
from gradwire.server.streams.outbox import WorkerStream
from gradwire.worker.session.replica import Replica
from gradwire.worker.training.sharding import coded_parts

DIVIDED = cut_plan((1,), (2, 2), (1,))
# Others, as units and cuts. Members of a group need a part for each.
PLANS = [((1, 1, 1), (3,)), ((1, 1, 1), (1, 2, 3, 4)), ((1, 1, 1), (2, 3))]
LARGER = [((3,), ()), ((1, 2), ()), ((2, 1), ())]
ELEMENTS = DIVIDED.elements
MANIFEST_OF = tuple(
    Tensor(name=name, shape=(size,), dtype="float32") for name, size in (("u", 1), ("v", 4), ("w", 1))
)
RATE = 0.01


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A part of a push as it travels. values: none if it is empty. damaged: whether its bytes change on the
    way."""

    seq: int
    assignment: int
    plan: int
    part: int
    values: tuple[float, ...]
    damaged: bool = False

    @property
    def data(self) -> list[Any]:
        return [dense(*self.values).data] if self.values else []

    def messages(self) -> tuple[PartHeader] | tuple[PartHeader, Chunk]:
        payload = dense(*self.values)
        described = (payload_header(payload),) if self.values else ()
        identity: dict[str, Any] = {
            "seq": self.seq,
            "assignment": self.assignment,
            "part": self.part,
            "plan": self.plan,
        }
        header = PartHeader(**identity, payloads=described)
        if not self.values:
            return (header,)
        checksum = crc32c((payload.data,)) ^ self.damaged
        transfer = part_transfer(self.seq, self.part)
        return header, Chunk(transfer=transfer, offset=0, data=payload.data, crc32c=checksum)


Message = Piece | Commit | Abandon


@dataclass(slots=True)
class Sending:
    """A push without an outcome."""

    assignment: Assignment
    parts: dict[int, Piece]
    commit: Commit

    def messages(self, known: Iterable[int] = (), plan: int | None = None) -> list[Message]:
        """Return the messages of the push that a server needs if it has some parts. plan: number of its plan,
        if known."""
        if plan is not None and plan != self.commit.plan:
            return [self.commit]
        return [*(piece for part, piece in self.parts.items() if part not in known), self.commit]


@dataclass(kw_only=True, slots=True)
class Sim:
    """A worker: what it knows, which may be less than what the server has sent."""

    name: str
    incarnation: int
    attached: bool = False
    ready: bool = False
    version: int | None = None
    plan: Plan = DIVIDED
    assigned: int = 0
    unread: int = 0  # id of the assignment that it did not begin, because its replica had drifted
    assignments: list[Assignment] = field(default_factory=list[Assignment])  # still to be answered
    seq: int = 0
    open: dict[int, Sending] = field(default_factory=dict[int, Sending])
    stream: WorkerStream | None = None  # the server's end of the last one
    asking: e.MoreWanted | None = None  # what it waits for an answer to
    queue: list[Message] = field(default_factory=list[Message])  # on its way
    arrived: list[Message] = field(default_factory=list[Message])  # at any time
    evaluation: Assignment | None = None  # still to be done
    report: Assignment | None = None  # the last one done, told again on every new stream
    finished: bool = False


def replica() -> Replica:
    """A worker's, at version 0, divided as the server's."""
    model = torch.nn.Module()
    for tensor in MANIFEST_OF:
        model.register_parameter(tensor.name, torch.nn.Parameter(torch.zeros(tensor.shape)))
    made = Replica(model, 1)
    made.version = 0
    made.adopt(DIVIDED)
    return made


def samples_of(assignment: Assignment) -> list[tuple[int, int]]:
    """Return samples as (epoch, index in its order)."""
    return [(assignment.epoch, each.start + i) for each in assignment.ranges for i in range(each.count)]


def computed(assignment: Assignment) -> list[tuple[int, int]]:
    """The samples behind a push for it."""
    return list(coefficients(assignment)[0])


def coefficients(assignment: Assignment) -> tuple[list[tuple[int, int]], list[float]]:
    """The samples behind a push for it, and what the gradient of each counts in the push."""
    samples = samples_of(assignment)
    if not assignment.stragglers:
        return samples, [1 / len(samples)] * len(samples) if samples else []
    order = np.arange(len(samples))
    parts = coded_parts(order, assignment)
    places: list[int] = [place for part in parts for place in part.indices.tolist()]
    chosen = [samples[place] for place in places]
    return chosen, [part.weight / len(part.indices) for part in parts for _ in part.indices]


def label(key: e.PushKey) -> str:
    return "/".join(map(str, key))


def values(name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The gradient of a push: anything, as long as it is always the same."""
    return np.random.default_rng(list(name.encode())).standard_normal(ELEMENTS).astype(np.float32)


def parts_of(assignment: Assignment, plan: Plan) -> frozenset[int]:
    """Return the parts that are pushed for an assignment."""
    if assignment.parts:
        return frozenset(assignment.parts)
    return plan.slice(assignment.slice, max(1, assignment.slices))


def elements_of(assignment: Assignment, plan: Plan) -> list[int]:
    bounds = [plan.parts[part] for part in parts_of(assignment, plan)]
    return sorted(element for part in bounds for element in range(part.start, part.end))


def seq_of(message: Message | PartHeader) -> int:
    return message.seq
