"""Fusion: which neighbours travel as one message, so that what any message takes counts once.

Layers are in forward order; backward produces their gradients from the last to the first, and messages go
out one after the other, each once it has all of its gradients:

    start(g) = max(produced(first layer of g), end of the message before)
    end(g) = start(g) + alpha + beta * bytes(g)

layer_by_layer   wait-free backpropagation without merging: P-SGD if all elements are sent, LAGS if some are
by_bytes         messages of a fixed size at least: MGS
mg_wfbp          merge a layer into the next one where that ends no later: (Q1)
seamgs           the same, and only where the error of sparsification does not grow: (Q1) and (Q2)
fastest          of all divisions the one that ends first

    Q1 (time)       start(l) + alpha > produced(l - 1)
    Q2 (accuracy)   (density(l-1) - density(l)) * (weight(l-1) - weight(l)) <= 0
                    with weight = square norm / elements

Sources: Shi et al., "MG-WFBP: Efficient Data Communication for Distributed Synchronous SGD Algorithms"
(INFOCOM 2019) for Q1; the paper on accuracy-aware sparse gradient fusion (SEAMGS-SGD), algorithm 1.
Differences from the latter, whose formulas have slips: (12) counts the time of l - 1 twice; the second line
of (19) needs <=; (22) is < 0, but equality, which (18) allows, is a merge that changes nothing, and without
it equal densities would never be merged. With equal densities everywhere Q2 always holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .profile import Layer, Link, produced


@dataclass(frozen=True, slots=True)
class Group:
    """Layers from `first` up to, but not including, `last`, which are sent as one message."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Sent:
    """When a group's message begins and ends, in seconds from the beginning of backward."""

    group: Group
    start_s: float
    end_s: float


def sent(layers: Sequence[Layer], link: Link, groups: Sequence[Group]) -> list[Sent]:
    """When each of the groups, which come in the order of backward, is sent."""
    ready, free, found = produced(layers), 0.0, list[Sent]()
    for group in groups:
        start = max(ready[group.first], free)
        free = start + link.seconds(sum(layer.sent_bytes for layer in layers[group.first : group.last]))
        found.append(Sent(group, start, free))
    return found


def sparse_error(layer: Layer) -> float:
    """What sparsification leaves out, as the square of a norm: (2)."""
    return (1 - layer.density) * layer.square_norm


def layer_by_layer(layers: Sequence[Layer]) -> list[Group]:
    return [Group(place, place + 1) for place in reversed(range(len(layers)))]


def by_bytes(layers: Sequence[Layer], least_bytes: float) -> list[Group]:
    """Each group is closed once it has so many bytes."""
    groups: list[Group] = []
    last, held = len(layers), 0.0
    for place in reversed(range(len(layers))):
        held += layers[place].sent_bytes
        if held >= least_bytes or not place:
            groups.append(Group(place, last))
            last, held = place, 0.0
    return groups


def mg_wfbp(layers: Sequence[Layer], link: Link) -> list[Group]:
    return _greedy(layers, link, lambda later, earlier: True)


def seamgs(layers: Sequence[Layer], link: Link) -> list[Group]:
    return _greedy(layers, link, keeps_accuracy)


def keeps_accuracy(later: Layer, earlier: Layer) -> bool:
    """Q2: what is sent of both together leaves no larger an error than what is sent of each."""
    return (earlier.density - later.density) * (earlier.weight - later.weight) <= 0


def _greedy(layers: Sequence[Layer], link: Link, may: Callable[[Layer, Layer], bool]) -> list[Group]:
    """From the last layer to the second: send what is held, or hold it for the next one. O(layers)."""
    if not layers:
        return []
    ready, groups, free = produced(layers), list[Group](), 0.0
    last, held = len(layers), layers[-1]
    for place in reversed(range(1, len(layers))):
        start = max(ready[place], free)
        if start + link.start_s > ready[place - 1] and may(held, layers[place - 1]):
            held = held.with_(layers[place - 1])
            continue
        groups.append(Group(place, last))
        free = start + link.seconds(held.sent_bytes)
        last, held = place, layers[place - 1]
    groups.append(Group(0, last))
    return groups


def fastest(
    layers: Sequence[Layer], link: Link, may: Callable[[Layer, Layer], bool] = lambda later, earlier: True
) -> list[Group]:
    """The division whose last message ends first; of several, one with few messages.

    may: whether a layer may join those behind it. A later end is never better for what follows, so that it is
    enough to know the earliest end for each number of layers that are through. O(layers ** 2).
    """
    ready = produced(layers)
    # By the number of the first layer that is sent: end, messages, and the groups' first layers.
    known: dict[int, tuple[float, int, list[Group]]] = {len(layers): (0.0, 0, [])}
    for first in reversed(range(len(layers))):
        found: list[tuple[float, int, list[Group]]] = []
        for last in range(first + 1, len(layers) + 1):
            held = _joined(layers, first, last, may)
            if held is not None:
                end, messages, groups = known[last]
                start = max(end, ready[first])
                after = [*groups, Group(first, last)]
                found.append((start + link.seconds(held.sent_bytes), messages + 1, after))
        known[first] = min(found, key=lambda each: each[:2])
    return known[0][2]


def _joined(
    layers: Sequence[Layer], first: int, last: int, may: Callable[[Layer, Layer], bool]
) -> Layer | None:
    """Layers as one, joined from the last to the first; None if one of them may not join."""
    held = layers[last - 1]
    for place in reversed(range(first, last - 1)):
        if not may(held, layers[place]):
            return None
        held = held.with_(layers[place])
    return held
