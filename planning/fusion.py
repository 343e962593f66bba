"""Fusion: which neighbours travel as one message, so that what any message takes counts once.

Layers are in forward order; backward produces their gradients from the last to the first, and messages go
out one after the other, each once it has all of its gradients:

    start(g) = max(produced(first layer of g), end of the message before)
    end(g) = start(g) + alpha + beta * bytes(g)

layer_by_layer   wait-free backpropagation without merging: P-SGD if all elements are sent, LAGS if some are
by_bytes         messages of a fixed size at least: MGS
seamgs           merge a layer into the next one where that ends no later, and the sparse error does not grow:
                 (Q1) and (Q2)
fastest          of all divisions the one that ends first

    Q1 (time)       start(l) + alpha > produced(l - 1)
    Q2 (accuracy)   (density(l-1) - density(l)) * (weight(l-1) - weight(l)) <= 0
                    with weight = square norm / elements; true if l or l - 1 has no sparse tensor

Sources: Shi et al., "MG-WFBP: Efficient Data Communication for Distributed Synchronous SGD Algorithms"
(INFOCOM 2019) for Q1; Li et al., "Accuracy-Aware Sparse Gradient Fusion Algorithm for Data-Parallel Deep
Learning" (SEAMGS-SGD; Journal of Jilin University, Science Edition, 2025, no. 5), algorithm 1, for Q2.
Differences from the latter, whose formulas have slips: (12) counts the time of l - 1 twice; the second line
of (19) needs <=; (22) is < 0, but equality, which (18) allows, is a merge that changes nothing, and without
it equal densities would never be merged. With equal densities everywhere Q2 always holds.

Two things that the paper leaves open decide how much is merged:

- Q2 compares sparse tensors. A tensor that is sent whole (a bias, a normalization) has no sparse error (2),
  and after a merge the sparsifier does not choose from it either. So density, weight and error are those of
  the sparse tensors of a group alone (`Layer`). Counted in with density 1, the dense tensors between two
  convolutions forbid nearly every merge.
- Densities are those that were asked for, not those that rounding to whole elements leaves. `ratio=100`
  sends 0.93 % of 432 elements and 1 % of 36,864; with these Q2 would find differences that nobody asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .profile import Layer, Link, produced

# Densities that differ by less, relative to the larger, are equal: sums of floats round.
SAME_DENSITY = 1e-9


@dataclass(frozen=True, slots=True)
class FusionGroup:
    """Layers from `first` up to, but not including, `last`, which are sent as one message."""

    first: int
    last: int


def layer_by_layer(layers: Sequence[Layer]) -> list[FusionGroup]:
    return [FusionGroup(place, place + 1) for place in reversed(range(len(layers)))]


def by_bytes(layers: Sequence[Layer], least_bytes: float) -> list[FusionGroup]:
    """Each message is closed once it has so many bytes."""
    groups: list[FusionGroup] = []
    last, held = len(layers), 0.0
    for place in reversed(range(len(layers))):
        held += layers[place].sent_bytes
        if held >= least_bytes or not place or not _alike(layers[place], layers[place - 1]):
            groups.append(FusionGroup(place, last))
            last, held = place, 0.0
    return groups


def keeps_accuracy(later: Layer, earlier: Layer) -> bool:
    """Q2: return whether choosing from both together leaves no larger a sparse error than from each."""
    if not (later.sparse_elements and earlier.sparse_elements):
        return True
    if math.isclose(later.density, earlier.density, rel_tol=SAME_DENSITY):
        return True
    return (earlier.density - later.density) * (earlier.weight - later.weight) <= 0


def seamgs(
    layers: Sequence[Layer], link: Link, may: Callable[[Layer, Layer], bool] = keeps_accuracy
) -> list[FusionGroup]:
    """From the last layer to the second: send what is held, or hold it for the next one. O(layers).

    may: whether a layer may join those behind it, as far as accuracy goes; Q2 unless something is compared.
    """
    if not layers:
        return []
    ready, groups, free = produced(layers), list[FusionGroup](), 0.0
    last, held = len(layers), layers[-1]
    for place in reversed(range(1, len(layers))):
        start = max(ready[place], free)
        earlier = layers[place - 1]
        if start + link.start_s > ready[place - 1] and _alike(held, earlier) and may(held, earlier):
            held = held.with_(earlier)
            continue
        groups.append(FusionGroup(place, last))
        free = start + link.seconds(held.sent_bytes)
        last, held = place, earlier
    groups.append(FusionGroup(0, last))
    return groups


def fastest(layers: Sequence[Layer], link: Link) -> list[FusionGroup]:
    """The division whose last message ends first; of several, one with few messages.

    A later end is never better for what follows, so that it is enough to know the earliest end for each
    number of layers that are through. O(layers ** 2).
    """
    if not layers:
        return []
    ready = produced(layers)
    # By the first layer that is through: when, after how many messages, and the end of the last of them.
    known: dict[int, tuple[float, int, int]] = {len(layers): (0.0, 0, len(layers))}
    for last in range(len(layers), 0, -1):
        free, messages, _ = known[last]
        size = layers[last - 1].sent_bytes
        for first in range(last - 1, -1, -1):
            end = max(free, ready[first]) + link.seconds(size)
            known[first] = min(known.get(first, (end, messages + 1, last)), (end, messages + 1, last))
            earlier = layers[first - 1]
            if not first or not _alike(layers[last - 1], earlier):
                break
            size += earlier.sent_bytes
    groups: list[FusionGroup] = []
    first = 0
    while first < len(layers):
        groups.append(FusionGroup(first, known[first][2]))
        first = groups[-1].last
    return groups[::-1]


def _alike(later: Layer, earlier: Layer) -> bool:
    """Whether they may be of one message: no part mixes parameter groups."""
    return later.group == earlier.group
