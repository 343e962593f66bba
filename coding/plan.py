"""Who computes which block of a batch, and which packets are exchanged.

n nodes, numbered from 0. A batch is divided into blocks, and the gradient over the samples of a block is
computed by its holders. A packet goes from its sender to its targets and is the sum of terms, each one slice
of the gradient of one block; slices of a block are equal parts of its elements. Sums are modulo 2³², so that
a receiver gets the slice that it lacks, to the bit, by subtracting those that it has computed itself.

A batch has C(n,r) blocks, and every r-subset of the nodes holds one of them; r is the redundancy, 1 <= r < n
(or r = n = 1). In each group of r + 1 nodes, each node sends the others one packet: a sum of r slices, of
which each of the others lacks one.

Source: the coded SGD paper. Its pseudo-code makes packets of all r-subsets of a node's blocks, which for
r >= 3 also makes some that belong to no group of r + 1 nodes, against its own count: here, groups are listed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations
from math import comb

MAX_BLOCKS = 1024  # that a batch is divided into; more would be hardly a sample each
MAX_PACKETS = 1 << 14  # of an exchange; a server has to look at each of them
MAX_NODES = 128  # so that without redundancy there are at most `MAX_PACKETS`
NOBODY = 2**32 - 1  # in the place of a sender


@dataclass(frozen=True, slots=True)
class PlannedPacket:
    """terms: (block, slice) pairs that are summed. Each of `targets` holds all of these blocks but one."""

    sender: int
    targets: tuple[int, ...]
    terms: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ExchangePlan:
    """slices: that a block's gradient is cut into. holders: of each block, ascending. blocks: that are
    exchanged, in ascending order; all of them, unless nobody is left who has one."""

    nodes: int
    slices: int
    holders: tuple[tuple[int, ...], ...]
    blocks: tuple[int, ...]
    packets: tuple[PlannedPacket, ...]

    @cached_property
    def held(self) -> tuple[frozenset[int], ...]:
        """By each node: the blocks that it computes."""
        return tuple(
            frozenset(block for block, holders in enumerate(self.holders) if node in holders)
            for node in range(self.nodes)
        )

    @cached_property
    def sent_by(self) -> list[list[int]]:
        """Of each node: indices of the packets that it sends."""
        sent: list[list[int]] = [[] for _ in range(self.nodes)]
        for index, packet in enumerate(self.packets):
            sent[packet.sender].append(index)
        return sent

    def sent_to(self, node: int) -> list[int]:
        """Indices of the packets that a node receives."""
        return [index for index, packet in enumerate(self.packets) if node in packet.targets]


def is_possible(nodes: int, redundancy: int) -> bool:
    """Whether so many nodes can have this redundancy, and an exchange not too many blocks and packets."""
    if not 1 <= redundancy < max(nodes, 2):
        return False
    packets = comb(nodes, redundancy + 1) * (redundancy + 1)
    return comb(nodes, redundancy) <= MAX_BLOCKS and packets <= MAX_PACKETS


@lru_cache(maxsize=64)
def coded_plan(nodes: int, redundancy: int) -> ExchangePlan:
    """Raises ValueError for a redundancy that so many nodes cannot have."""
    if not is_possible(nodes, redundancy):
        limits = f"1 to {max(1, nodes - 1)}, up to {MAX_BLOCKS} blocks and up to {MAX_PACKETS} packets"
        raise ValueError(f"redundancy of {nodes} nodes: expected {limits}, got {redundancy}")
    holders = tuple(combinations(range(nodes), redundancy))
    number = {each: block for block, each in enumerate(holders)}
    packets: list[PlannedPacket] = []
    for group in combinations(range(nodes), redundancy + 1):
        for sender in group:
            targets = tuple(node for node in group if node != sender)
            terms: list[tuple[int, int]] = []
            for lacking in targets:
                block = tuple(node for node in group if node != lacking)
                terms.append((number[block], block.index(sender)))
            packets.append(PlannedPacket(sender, targets, tuple(terms)))
    blocks = tuple(range(len(holders)))
    return ExchangePlan(nodes, redundancy, holders, blocks, tuple(packets))


def resent(original: ExchangePlan, senders: Sequence[int], present: Iterable[int]) -> ExchangePlan:
    """What is done instead when an exchange has failed: each block whole, from its sender to all others of
    `present`, also those that have computed it, as they may have got something else; or not at all, where its
    sender is `NOBODY`, and it is left out of the sum."""
    there = tuple(present)
    holders = tuple(() if sender == NOBODY else (sender,) for sender in senders)
    blocks = tuple(block for block, sender in enumerate(senders) if sender != NOBODY)
    packets: list[PlannedPacket] = []
    for block in blocks:
        if targets := tuple(node for node in there if node != senders[block]):
            packets.append(PlannedPacket(senders[block], targets, ((block, 0),)))
    return ExchangePlan(original.nodes, 1, holders, blocks, tuple(packets))


# The one seam: benchmarks run daemons with another plan, to compare. Both sides of the wire derive the plan
# from the same numbers, so all processes of a job must make the same one.
_make_plan: Callable[[int, int], ExchangePlan] = coded_plan


def plan(nodes: int, redundancy: int) -> ExchangePlan:
    """The exchange of so many nodes. Raises ValueError for a redundancy that they cannot have."""
    return _make_plan(nodes, redundancy)


@contextmanager
def planning_with(make_plan: Callable[[int, int], ExchangePlan]) -> Generator[None]:
    """Let `plan` return what `make_plan(nodes, redundancy)` does, in this process."""
    global _make_plan
    before, _make_plan = _make_plan, make_plan
    try:
        yield
    finally:
        _make_plan = before
