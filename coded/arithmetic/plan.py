"""The plan of a coded exchange: which node computes which block of a batch, and which packets they exchange.

n nodes are numbered from 0. A batch is divided into blocks. The holders of a block compute the gradient over
its samples. A slice is one of the equal parts that a block's gradient is cut into. A packet goes from its
sender to its targets and is a sum of terms, each one slice of the gradient of one block. Sums are modulo 2³².
A receiver gets the slice that it lacks, to the bit, by subtracting the slices that it has computed itself.

A batch has C(n,r) blocks, and every r-subset of the nodes holds one of them; r is the redundancy, 1 <= r < n
(or r = n = 1). In each group of r + 1 nodes, each node sends the other nodes one packet: a sum of r slices,
of which each of the other nodes lacks one.

Source: the coded SGD paper. Its pseudo-code makes packets of all r-subsets of a node's blocks. For r >= 3
this includes packets that belong to no group of r + 1 nodes, against the paper's own count. This module lists
groups instead.

Errata of the paper, which is read as above. Its text swaps the P and J of algorithm 3. Algorithm 2 uses i for
two things in lines 7 and 8. Equation (9) has q where the block's index is i. The last index in (16) is r - 1.
In (24) the packets go to subsets of a group, not to an intersection.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations
from math import comb

MAX_BLOCKS = 1024  # of a batch; with more, a block would have hardly one sample
MAX_PACKETS = 1 << 14  # of an exchange; a server checks each of them
MAX_NODES = 128  # without redundancy, these send at most `MAX_PACKETS` packets
NOBODY = 2**32 - 1  # in a list of senders: no node sends this block


@dataclass(frozen=True, slots=True)
class PlannedPacket:
    """One packet of an exchange plan."""

    sender: int  # node that encodes and sends the packet
    targets: tuple[int, ...]  # each holds all blocks of `terms` but one
    terms: tuple[tuple[int, int], ...]  # (block, slice) pairs whose gradients the packet sums


@dataclass(frozen=True)
class ExchangePlan:
    """The assignment of blocks to nodes, and the packets, of one exchange.

    All processes derive the same plan.
    """

    nodes: int
    slices: int  # number of slices that each block's gradient is cut into
    holders: tuple[tuple[int, ...], ...]  # nodes that compute each block, ascending, by block
    blocks: tuple[int, ...]  # that are summed, ascending: all, unless every holder of one is lost
    packets: tuple[PlannedPacket, ...]  # all packets; an index into them names a packet on the wire

    @cached_property
    def held(self) -> tuple[frozenset[int], ...]:
        """The set of blocks that each node computes, by node."""
        return tuple(
            frozenset(block for block, holders in enumerate(self.holders) if node in holders)
            for node in range(self.nodes)
        )

    @cached_property
    def sent_by(self) -> list[list[int]]:
        """The indices of the packets that each node sends, by node."""
        sent: list[list[int]] = [[] for _ in range(self.nodes)]
        for index, packet in enumerate(self.packets):
            sent[packet.sender].append(index)
        return sent

    def sent_to(self, node: int) -> list[int]:
        """Return the indices of the packets that `node` receives, ascending."""
        return [index for index, packet in enumerate(self.packets) if node in packet.targets]


def is_possible(nodes: int, redundancy: int) -> bool:
    """Return True when this redundancy is allowed for `nodes` nodes.

    The exchange must have at most `MAX_BLOCKS` blocks and `MAX_PACKETS` packets.
    """
    if not 1 <= redundancy < max(nodes, 2):
        return False
    packets = comb(nodes, redundancy + 1) * (redundancy + 1)
    return comb(nodes, redundancy) <= MAX_BLOCKS and packets <= MAX_PACKETS


@lru_cache(maxsize=64)
def coded_plan(nodes: int, redundancy: int) -> ExchangePlan:
    """Return the exchange plan for this number of nodes and this redundancy.

    Equal arguments return the same object.

    Raises:
        ValueError: if the redundancy is not possible for `nodes` nodes.
    """
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
    """Return the plan that repeats a failed exchange: every block is sent whole to all other nodes.

    Nodes that have computed a block also receive it, because their gradient may differ from the sender's.

    Args:
        senders: node that sends each block, by block; `NOBODY` leaves the block out of the sum.
    """
    there = tuple(present)
    holders = tuple(() if sender == NOBODY else (sender,) for sender in senders)
    blocks = tuple(block for block, sender in enumerate(senders) if sender != NOBODY)
    packets: list[PlannedPacket] = []
    for block in blocks:
        if targets := tuple(node for node in there if node != senders[block]):
            packets.append(PlannedPacket(senders[block], targets, ((block, 0),)))
    return ExchangePlan(original.nodes, 1, holders, blocks, tuple(packets))


# Benchmarks replace this function to compare plans. Server and workers derive the plan from the same numbers,
# so all processes of a job must use the same function.
_make_plan: Callable[[int, int], ExchangePlan] = coded_plan


def plan(nodes: int, redundancy: int) -> ExchangePlan:
    """Return the exchange plan for this number of nodes and this redundancy.

    Raises:
        ValueError: if the redundancy is not possible for `nodes` nodes.
    """
    return _make_plan(nodes, redundancy)


@contextmanager
def planning_with(make_plan: Callable[[int, int], ExchangePlan]) -> Generator[None]:
    """Have `plan` call another function in this process, for the duration of a with block."""
    global _make_plan
    before, _make_plan = _make_plan, make_plan
    try:
        yield
    finally:
        _make_plan = before
