"""Exchanges that coded mode is compared with. All but `summed` give the same bits as the coded one.

    scheme    | blocks | held by                      | packets
    coded     | C(n,r) | every r-subset has one       | sums of slices, to the rest of a group of r + 1
    uncoded   | C(n,r) | every r-subset has one       | whole blocks, one packet per node that lacks it
    unicast   | C(n,r) | one node each                | whole blocks, one packet per other node
    multicast | C(n,r) | one node each                | whole blocks, one packet for all other nodes
    summed    | n      | one node each                | like multicast: a node's part of the batch is one
    block

As a program it is a daemon that uses one of the schemes. All processes of a job must have the same one:

    python -m gradwire.benchmarks.schemes unicast server --mode coded …
    python -m gradwire.benchmarks.schemes unicast worker --server …
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import combinations
from math import comb

from ..coded.arithmetic import ExchangePlan, PlannedPacket, planning_with
from ..coded.arithmetic.plan import coded_plan

Scheme = Callable[[int, int], ExchangePlan]  # from the numbers of nodes and of redundancy


@lru_cache(maxsize=64)
def uncoded(nodes: int, redundancy: int) -> ExchangePlan:
    """Return the plan in which every r-subset of the nodes holds a block, sent whole to each node without it.

    Each packet has one target.
    """
    holders = tuple(combinations(range(nodes), redundancy))
    # The holders of a block take turns as its sender, so that all nodes send about equally much.
    senders = [each[block % redundancy] for block, each in enumerate(holders)]
    return _one_target_each(_whole_blocks(nodes, holders, senders))


@lru_cache(maxsize=64)
def unicast(nodes: int, redundancy: int) -> ExchangePlan:
    """Return the plan in which each of C(n,r) blocks has one holder, which sends it to each other node alone.

    Each packet has one target.
    """
    return _one_target_each(multicast(nodes, redundancy))


@lru_cache(maxsize=64)
def multicast(nodes: int, redundancy: int) -> ExchangePlan:
    """Return the plan in which each of C(n,r) blocks has one holder, which sends one packet for all nodes."""
    return _one_holder_each(nodes, comb(nodes, redundancy))


@lru_cache(maxsize=64)
def summed(nodes: int, redundancy: int) -> ExchangePlan:
    """Return the plan in which each node holds one block, its part of the batch, and sends one packet.

    Each packet is for all other nodes.
    """
    return _one_holder_each(nodes, nodes)


SCHEMES: dict[str, Scheme] = {
    "coded": coded_plan,
    "uncoded": uncoded,
    "unicast": unicast,
    "multicast": multicast,
    "summed": summed,
}


def _one_holder_each(nodes: int, blocks: int) -> ExchangePlan:
    """Return a plan in which `blocks` blocks are distributed among the nodes, each with one holder."""
    senders = [block % nodes for block in range(blocks)]
    return _whole_blocks(nodes, tuple((sender,) for sender in senders), senders)


def _whole_blocks(nodes: int, holders: tuple[tuple[int, ...], ...], senders: Sequence[int]) -> ExchangePlan:
    """Return a plan in which each block is sent whole, in one packet to all nodes that do not hold it."""
    lacking = [tuple(node for node in range(nodes) if node not in holding) for holding in holders]
    each = enumerate(zip(senders, lacking, strict=True))
    packets = tuple(
        PlannedPacket(sender, targets, ((block, 0),)) for block, (sender, targets) in each if targets
    )
    return ExchangePlan(
        nodes=nodes, slices=1, holders=holders, blocks=tuple(range(len(holders))), packets=packets
    )


def _one_target_each(plan: ExchangePlan) -> ExchangePlan:
    """Return the plan with each packet replaced by copies for one target each."""
    packets = (
        PlannedPacket(packet.sender, (target,), packet.terms)
        for packet in plan.packets
        for target in packet.targets
    )
    return replace(plan, packets=tuple(packets))


def main(arguments: Sequence[str]) -> int:
    """Run a daemon with a scheme; return its exit code.

    Args:
        arguments: name of the scheme, `server` or `worker`, and the daemon's own arguments.
    """
    from ..server.cli import main as gc_server
    from ..worker.cli import main as gc_worker

    scheme, daemon, *rest = arguments
    with planning_with(SCHEMES[scheme]):
        return {"server": gc_server, "worker": gc_worker}[daemon](rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
