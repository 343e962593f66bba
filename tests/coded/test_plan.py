"""Plans and exchanges, for every number of nodes and redundancy that can be tried exhaustively."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations
from math import comb

import numpy as np
import numpy.typing as npt
import pytest

from gradwire.benchmarks.schemes import SCHEMES, multicast, summed, uncoded, unicast
from gradwire.coded.arithmetic import NOBODY, Exchange, ExchangePlan, plan, planning_with, resent

Words = npt.NDArray[np.uint32]
CASES = [(nodes, r) for nodes in range(2, 8) for r in range(1, nodes)]


def blocks_of(made: ExchangePlan, elements: int, seed: int = 0) -> Words:
    """Gradients that fill the whole range of 32 bits, so that every sum of them wraps."""
    rng = np.random.default_rng([seed, made.nodes, len(made.holders), elements])
    return rng.integers(0, 2**32, (len(made.holders), elements), dtype=np.uint32)


def carry_out(made: ExchangePlan, blocks: Words, *, lost: tuple[int, int] | None = None) -> list[Exchange]:
    """Every node's exchange after all packets but (index, target) `lost` have gone to their targets."""
    nodes = [
        Exchange(made, node, {block: blocks[block] for block in made.held[node]}, blocks.shape[1])
        for node in range(made.nodes)
    ]
    for index in map(int, np.random.default_rng(1).permutation(len(made.packets))):
        packet = made.packets[index]
        data = nodes[packet.sender].encoded(index)
        for target in packet.targets:
            if (index, target) != lost:
                nodes[target].take(index, data)
    return nodes


def exact_sum(blocks: Words) -> npt.NDArray[np.int64]:
    total: npt.NDArray[np.int64] = blocks.view(np.int32).sum(axis=0, dtype=np.int64)
    return total


@pytest.mark.parametrize(("nodes", "r"), CASES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_everybody_gets_the_sum_of_all_blocks_to_the_bit(scheme: str, nodes: int, r: int) -> None:
    made = SCHEMES[scheme](nodes, r)
    for elements in (0, 1, r, 13):
        blocks = blocks_of(made, elements)
        for each in carry_out(made, blocks):
            assert each.complete
            np.testing.assert_array_equal(each.sums(), exact_sum(blocks))


@pytest.mark.parametrize(("nodes", "r"), CASES)
def test_every_block_has_the_holders_that_the_scheme_gives_it(nodes: int, r: int) -> None:
    coded = plan(nodes, r)
    assert sorted(coded.holders) == sorted(combinations(range(nodes), r))
    assert all(len(held) == comb(nodes - 1, r - 1) for held in coded.held)
    assert uncoded(nodes, r).holders == coded.holders
    for scheme, blocks in ((unicast, comb(nodes, r)), (multicast, comb(nodes, r)), (summed, nodes)):
        made = scheme(nodes, r)
        assert len(made.holders) == blocks
        sizes = [len(held) for held in made.held]
        assert max(sizes) - min(sizes) <= 1


def uplink(made: ExchangePlan) -> Fraction:
    """Block gradients that all nodes send together, each packet counted once however many it is for: the load
    as the paper counts it, and what goes up to a server that relays packets."""
    return Fraction(len(made.packets), made.slices)


def downlink(made: ExchangePlan) -> Fraction:
    """Block gradients that all nodes receive together: what comes down from a server that relays."""
    return Fraction(sum(len(packet.targets) for packet in made.packets), made.slices)


@pytest.mark.parametrize(("nodes", "r"), CASES)
def test_loads_are_those_of_the_paper(nodes: int, r: int) -> None:
    blocks = comb(nodes, r)
    coded = plan(nodes, r)
    assert len(coded.packets) == comb(nodes, r + 1) * (r + 1)
    assert {len(packet.targets) for packet in coded.packets} == {r}
    assert uplink(coded) == Fraction(comb(nodes, r + 1) * (r + 1), r)
    assert downlink(coded) == uplink(coded) * r
    assert uplink(uncoded(nodes, r)) == (nodes - r) * blocks
    plain = unicast(nodes, r)
    assert uplink(plain) == (nodes - 1) * blocks
    assert uplink(coded) / uplink(plain) == Fraction(nodes - r, (nodes - 1) * r)
    assert uplink(multicast(nodes, r)) == blocks
    assert uplink(summed(nodes, r)) == nodes


@pytest.mark.parametrize(("nodes", "r"), CASES)
def test_packets_are_those_of_the_groups(nodes: int, r: int) -> None:
    """M(S, i) = the sum over k in S, k != i, of the slice of G(S without k) at the position of i in it."""
    made = plan(nodes, r)
    number = {holders: block for block, holders in enumerate(made.holders)}
    expected = {
        (group, sender): {
            (number[tuple(n for n in group if n != k)], [n for n in group if n != k].index(sender))
            for k in group
            if k != sender
        }
        for group in combinations(range(nodes), r + 1)
        for sender in group
    }
    got = {
        (tuple(sorted((packet.sender, *packet.targets))), packet.sender): set(packet.terms)
        for packet in made.packets
    }
    assert got == expected


def test_a_duplicate_changes_nothing() -> None:
    made = plan(4, 2)
    blocks = blocks_of(made, 10)
    nodes = carry_out(made, blocks)
    for index in made.sent_to(0):
        nodes[0].take(index, nodes[made.packets[index].sender].encoded(index))
    np.testing.assert_array_equal(nodes[0].sums(), exact_sum(blocks))


def test_a_lost_packet_leaves_its_targets_incomplete() -> None:
    made = plan(4, 2)
    lost = made.sent_to(3)[0]
    nodes = carry_out(made, blocks_of(made, 10), lost=(lost, 3))
    assert [each.complete for each in nodes] == [True, True, True, False]
    assert nodes[3].missing == {lost}


def test_a_packet_for_others_or_of_another_size_is_refused() -> None:
    made = plan(4, 2)
    blocks = blocks_of(made, 10)
    nodes = carry_out(made, blocks)
    (mine, *_) = made.sent_by[0]
    data = nodes[0].encoded(mine)
    with pytest.raises(ValueError, match="node 0"):
        nodes[0].take(mine, data)
    target = made.packets[mine].targets[0]
    with pytest.raises(ValueError, match="5 elements"):
        nodes[target].take(mine, data[:-1])


@pytest.mark.parametrize(("nodes", "r"), CASES)
def test_without_one_node_the_others_still_get_all_that_somebody_has(nodes: int, r: int) -> None:
    original = plan(nodes, r)
    blocks = blocks_of(original, 7)
    for gone in range(nodes):
        there = [node for node in range(nodes) if node != gone]
        senders = [
            next((holder for holder in holders if holder != gone), NOBODY) for holders in original.holders
        ]
        again = resent(original, senders, there)
        assert len(again.blocks) == len(original.blocks) - (1 if r == 1 else 0)
        assert not any(gone in (packet.sender, *packet.targets) for packet in again.packets)
        finished = carry_out(again, blocks)
        for node in there:
            np.testing.assert_array_equal(finished[node].sums(), exact_sum(blocks[list(again.blocks)]))


@pytest.mark.parametrize(("nodes", "r"), [case for case in CASES if case[1] > 1])
def test_whole_blocks_add_up_to_the_same_sum_where_holders_have_computed_something_else(
    nodes: int, r: int
) -> None:
    original = plan(nodes, r)
    again = resent(original, [holders[0] for holders in original.holders], range(nodes))
    blocks = blocks_of(again, 5)
    exchanges: list[Exchange] = []
    for node in range(nodes):
        computed = {block: blocks[block].copy() for block in original.held[node]}
        for block in original.held[node] - again.held[node]:
            computed[block] += np.uint32(1 + node)  # which its sender does not have
        exchanges.append(Exchange(again, node, computed, 5))
    for index, packet in enumerate(again.packets):
        for target in packet.targets:
            exchanges[target].take(index, exchanges[packet.sender].encoded(index))
    for exchange in exchanges:
        np.testing.assert_array_equal(exchange.sums(), exact_sum(blocks))


@pytest.mark.parametrize(("nodes", "r"), [(1, 2), (2, 2), (4, 4), (4, 0), (4, -1), (20, 10)])
def test_what_cannot_be_is_refused(nodes: int, r: int) -> None:
    with pytest.raises(ValueError, match="redundancy of"):
        plan(nodes, r)


def test_the_plan_of_a_process_can_be_replaced_to_compare() -> None:
    with planning_with(summed):
        assert plan(4, 2) is summed(4, 2)
    assert plan(4, 2) is SCHEMES["coded"](4, 2)


def test_one_node_exchanges_nothing() -> None:
    made = plan(1, 1)
    assert made.packets == ()
    (alone,) = carry_out(made, blocks := blocks_of(made, 5))
    np.testing.assert_array_equal(alone.sums(), exact_sum(blocks))
