"""Who computes which block of a batch, and which packets are exchanged.

n nodes, numbered from 0. A batch is divided into blocks, and the gradient over the samples of a block is
computed by its holders. A packet goes from its sender to its targets and is the sum of terms, each one slice
of the gradient of one block; slices of a block are equal parts of its elements. Sums are modulo 2³², so that
a receiver gets the slice that it lacks, to the bit, by subtracting those that it has computed itself.

Every scheme but `CODED` is there to be compared with it. r is the redundancy, 1 <= r < n (or r = n = 1):

    scheme     blocks   held by                       packets
    CODED      C(n,r)   every r-subset has one        sums of slices, to the rest of a group of r + 1
    UNCODED    C(n,r)   every r-subset has one        whole blocks, one packet per node that lacks it
    UNICAST    C(n,r)   one node each                 whole blocks, one packet per other node
    MULTICAST  C(n,r)   one node each                 whole blocks, one packet for all other nodes
    SUMMED     n        one node each                 the same: a node's part of the batch is one block

Source: the coded SGD paper. Its pseudo-code makes packets of all r-subsets of a node's blocks, which for
r >= 3 also makes some that belong to no group of r + 1 nodes, against its own count: here, groups are listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import combinations
from math import comb

MAX_BLOCKS = 1024  # that a batch is divided into; more would be hardly a sample each
MAX_PACKETS = 1 << 14  # of an exchange; a server has to look at each of them
MAX_NODES = 128  # so that without redundancy there are as many packets
NOBODY = 2**32 - 1  # in the place of a sender


class Scheme(Enum):
    CODED = "coded"
    UNCODED = "uncoded"
    UNICAST = "unicast"
    MULTICAST = "multicast"
    SUMMED = "summed"


@dataclass(frozen=True, slots=True)
class Packet:
    """terms: (block, slice) pairs that are summed. Each of `targets` holds all of these blocks but one."""

    sender: int
    targets: tuple[int, ...]
    terms: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Plan:
    """slices: that a block's gradient is cut into. holders: of each block, ascending. blocks: that are
    exchanged, in ascending order; all of them, unless nobody is left who has one."""

    nodes: int
    slices: int
    holders: tuple[tuple[int, ...], ...]
    blocks: tuple[int, ...]
    packets: tuple[Packet, ...]

    @cached_property
    def held(self) -> tuple[frozenset[int], ...]:
        """By each node: the blocks that it computes."""
        return tuple(
            frozenset(block for block, holders in enumerate(self.holders) if node in holders)
            for node in range(self.nodes)
        )

    def sent_by(self, node: int) -> tuple[int, ...]:
        """Indices of the packets that a node sends."""
        return self._sent[node]

    @cached_property
    def _sent(self) -> tuple[tuple[int, ...], ...]:
        sent: list[list[int]] = [[] for _ in range(self.nodes)]
        for index, packet in enumerate(self.packets):
            sent[packet.sender].append(index)
        return tuple(map(tuple, sent))

    def sent_to(self, node: int) -> list[int]:
        """Indices of the packets that a node receives."""
        return [index for index, packet in enumerate(self.packets) if node in packet.targets]

    @property
    def uplink(self) -> Fraction:
        """Block gradients that all nodes send together, each packet counted once however many it is for: the
        load as the paper counts it, and what goes up to a server that relays packets."""
        return Fraction(len(self.packets), self.slices)

    @property
    def downlink(self) -> Fraction:
        """Block gradients that all nodes receive together: what comes down from a server that relays."""
        return Fraction(sum(len(packet.targets) for packet in self.packets), self.slices)


def blocks_in(scheme: Scheme, nodes: int, redundancy: int) -> int:
    """How many blocks a batch is divided into."""
    return nodes if scheme is Scheme.SUMMED else comb(nodes, redundancy)


def packets_in(scheme: Scheme, nodes: int, redundancy: int) -> int:
    """How many packets an exchange has."""
    blocks = blocks_in(scheme, nodes, redundancy)
    match scheme:
        case Scheme.CODED:
            return comb(nodes, redundancy + 1) * (redundancy + 1)
        case Scheme.UNCODED:
            return (nodes - redundancy) * blocks
        case Scheme.UNICAST:
            return (nodes - 1) * blocks
        case _:
            return blocks if nodes > 1 else 0


@lru_cache(maxsize=64)
def plan(scheme: Scheme, nodes: int, redundancy: int) -> Plan:
    """Raises ValueError for a redundancy that so many nodes cannot have."""
    _check(scheme, nodes, redundancy)
    match scheme:
        case Scheme.CODED:
            return _coded(nodes, redundancy)
        case Scheme.UNCODED:
            holders = tuple(combinations(range(nodes), redundancy))
            # Block after block another one of its holders, so that all send about as much.
            senders = [each[block % redundancy] for block, each in enumerate(holders)]
        case _:
            blocks = blocks_in(scheme, nodes, redundancy)
            holders = tuple((block % nodes,) for block in range(blocks))
            senders = [each[0] for each in holders]
    whole = _whole(nodes, holders, senders, range(nodes))
    return whole if scheme in (Scheme.MULTICAST, Scheme.SUMMED) else _one_target_each(whole)


def _check(scheme: Scheme, nodes: int, redundancy: int) -> None:
    if not 1 <= redundancy < max(nodes, 2):
        limit = f"1 to {max(1, nodes - 1)} with {nodes} nodes"
        raise ValueError(f"redundancy: expected {limit}, got {redundancy}")
    what = f"with {nodes} nodes and redundancy {redundancy}"
    blocks, packets = blocks_in(scheme, nodes, redundancy), packets_in(scheme, nodes, redundancy)
    if blocks > MAX_BLOCKS:
        raise ValueError(f"blocks: expected up to {MAX_BLOCKS}, got {blocks} {what}")
    if packets > MAX_PACKETS:
        raise ValueError(f"packets: expected up to {MAX_PACKETS}, got {packets} {what}")


def _coded(nodes: int, redundancy: int) -> Plan:
    holders = tuple(combinations(range(nodes), redundancy))
    number = {each: block for block, each in enumerate(holders)}
    packets: list[Packet] = []
    for group in combinations(range(nodes), redundancy + 1):
        for sender in group:
            targets = tuple(node for node in group if node != sender)
            terms: list[tuple[int, int]] = []
            for lacking in targets:
                block = tuple(node for node in group if node != lacking)
                terms.append((number[block], block.index(sender)))
            packets.append(Packet(sender, targets, tuple(terms)))
    blocks = tuple(range(len(holders)))
    return Plan(nodes, redundancy, holders, blocks, tuple(packets))


def resent(original: Plan, senders: Sequence[int], present: Iterable[int]) -> Plan:
    """What is done instead when an exchange has failed: each block whole, from its sender to everybody of
    `present` that lacks it; or not at all, where its sender is `NOBODY`, and it is left out of the sum."""
    return _whole(original.nodes, original.holders, senders, present)


def _whole(
    nodes: int, holders: tuple[tuple[int, ...], ...], senders: Sequence[int], present: Iterable[int]
) -> Plan:
    there = tuple(present)
    packets: list[Packet] = []
    for block, (holding, sender) in enumerate(zip(holders, senders, strict=True)):
        targets = tuple(node for node in there if node not in holding)
        if sender != NOBODY and targets:
            packets.append(Packet(sender, targets, ((block, 0),)))
    blocks = tuple(block for block, sender in enumerate(senders) if sender != NOBODY)
    return Plan(nodes, 1, holders, blocks, tuple(packets))


def _one_target_each(multicast: Plan) -> Plan:
    packets = tuple(
        Packet(packet.sender, (target,), packet.terms)
        for packet in multicast.packets
        for target in packet.targets
    )
    return replace(multicast, packets=packets)
