"""Fusion: which neighbouring tensors travel as one message, so that the fixed cost of a message is paid once.

Layers are in forward order. Backward produces their gradients from the last to the first. Messages are sent
one after another, each once it has all of its gradients:

    start(g) = max(produced(first layer of g), end of the previous message)
    end(g) = start(g) + alpha + beta * bytes(g)

layer_by_layer   wait-free backpropagation without merging: P-SGD if all elements are sent, LAGS if some are
by_bytes         messages of at least a fixed size: MGS
seamgs           merge a layer into the next one where that ends no later and the sparse error does not
                 grow: (Q1) and (Q2)
fastest          of all divisions the one that ends first

    Q1, time:       start(l) + alpha > produced(l - 1)
    Q2, accuracy:   (density(l-1) - density(l)) * (weight(l-1) - weight(l)) <= 0
                    with weight = squared norm / elements; true if l or l - 1 has no sparse tensor

Sources. Q1: Shi et al., "MG-WFBP: Efficient Data Communication for Distributed Synchronous SGD Algorithms"
(INFOCOM 2019). Q2: Li et al., "Accuracy-Aware Sparse Gradient Fusion Algorithm for Data-Parallel Deep
Learning" (SEAMGS-SGD; Journal of Jilin University, Science Edition, 2025, no. 5), algorithm 1.

With Q2 always true SEAMGS is MG-WFBP's greedy rule, Q1 alone. A merge never raises the sum over all groups
of (1 - density) * square norm, the sparse error (2), which holds for indices that all workers share, as
`randk` draws them.

Deviations from SEAMGS-SGD. Equation (15) needs t_reduce = alpha, the second line of (19) needs <=, and (12)
counts the time of l - 1 twice. The abstract's 1.63 over LAGS is that over P-SGD on ResNet-110; over LAGS its
table 1 has 1.25 to 1.46. Equation (22) has < 0; we also merge at equality, which (18) allows: such a
merge changes nothing, and without it layers of equal density would never be merged.

The paper leaves two things open. Both decide how much is merged:

- Q2 compares sparse tensors. A tensor that is sent whole (a bias, a normalization) has no sparse error (2),
  and after a merge the sparsifier does not choose from it either. Density, weight and error are therefore
  those of the sparse tensors of a group alone (`Layer`). Counted with density 1, the dense tensors between
  two convolutions would forbid nearly every merge.
- Densities are the requested ones, before rounding to whole elements. For instance, `ratio=100` sends
  0.93 % of 432 elements and 1 % of 36,864. From these figures Q2 would find differences that the user did
  not ask for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from .profile import Layer, Link, produced

# Densities that differ by less, relative to the larger one, count as equal, because sums of floats round.
SAME_DENSITY = 1e-9


@dataclass(frozen=True, slots=True)
class FusionGroup:
    """Layers that are sent as one message, by index in forward order, without `last`."""

    first: int
    last: int


class Reason(StrEnum):
    """The reasons why SEAMGS does not merge two neighbours: the later one would wait too long for the earlier
    one (Q1); the sparse error would grow (Q2)."""

    TIME = "Q1"
    ACCURACY = "Q2"


def layer_by_layer(layers: Sequence[Layer]) -> list[FusionGroup]:
    """Return a group for each layer, the last layer first."""
    return [FusionGroup(index, index + 1) for index in reversed(range(len(layers)))]


def by_bytes(layers: Sequence[Layer], least_bytes: float) -> list[FusionGroup]:
    """Return groups of neighbouring layers, the last layers first, each closed by the first layer or once it
    has `least_bytes` bytes."""
    groups: list[FusionGroup] = []
    last, held = len(layers), 0.0
    for index in reversed(range(len(layers))):
        held += layers[index].sent_bytes
        if held >= least_bytes or not index:
            groups.append(FusionGroup(index, last))
            last, held = index, 0.0
    return groups


def keeps_accuracy(later: Layer, earlier: Layer) -> bool:
    """Return True if choosing from both layers together leaves no larger sparse error, the squared norm of
    the elements that are not sent, than choosing from each (Q2)."""
    if not (later.sparse_elements and earlier.sparse_elements):
        return True
    if math.isclose(later.density, earlier.density, rel_tol=SAME_DENSITY):
        return True
    return (earlier.density - later.density) * (earlier.weight - later.weight) <= 0


def reasons(
    layers: Sequence[Layer], link: Link, may: Callable[[Layer, Layer], bool] = keeps_accuracy
) -> list[Reason | None]:
    """Return for each layer but the last why SEAMGS does not merge it with the layer behind it; None where
    it does.

    A layer joins the group behind it if backward produces the layer's gradient before the group's message
    could have started to carry bytes (Q1), and if `may(later, earlier)` allows it: Q2, but for comparisons.
    """
    if not layers:
        return []
    ready, found, free = produced(layers), list[Reason | None](), 0.0
    held = layers[-1]
    for index in reversed(range(1, len(layers))):
        start, earlier = max(ready[index], free), layers[index - 1]
        reason: Reason | None = None
        if start + link.start_s <= ready[index - 1]:
            reason = Reason.TIME
        elif not may(held, earlier):
            reason = Reason.ACCURACY
        found.append(reason)
        if reason is None:
            held = held.with_(earlier)
        else:
            free = start + link.seconds(held.sent_bytes)
            held = earlier
    return found[::-1]


def seamgs(
    layers: Sequence[Layer], link: Link, may: Callable[[Layer, Layer], bool] = keeps_accuracy
) -> list[FusionGroup]:
    """Return the groups of SEAMGS, the last layers first: merge a layer into the group behind it unless
    `reasons`, which takes the same arguments, has a reason against it."""
    apart = reasons(layers, link, may)
    borders = [0, *(index + 1 for index, reason in enumerate(apart) if reason is not None), len(layers)]
    return [FusionGroup(first, last) for first, last in pairwise(borders) if last > first][::-1]


def fastest(layers: Sequence[Layer], link: Link) -> list[FusionGroup]:
    """Return the groups of layers whose last message ends first, the last layers first.

    Of several such divisions it is one with the fewest messages. An earlier end of some messages is never
    worse for those that follow. It is therefore enough to keep the earliest end for each number of finished
    layers. This takes time O(layers ** 2).
    """
    if not layers:
        return []
    ready = produced(layers)
    # For each layer, if all layers from it to the last have been sent: (end in seconds, number of messages,
    # index after the last layer of the latest message).
    known: dict[int, tuple[float, int, int]] = {len(layers): (0.0, 0, len(layers))}
    for last in range(len(layers), 0, -1):
        free, messages, _ = known[last]
        size = layers[last - 1].sent_bytes
        for first in range(last - 1, -1, -1):
            end = max(free, ready[first]) + link.seconds(size)
            known[first] = min(known.get(first, (end, messages + 1, last)), (end, messages + 1, last))
            size += layers[first - 1].sent_bytes if first else 0.0
    groups: list[FusionGroup] = []
    first = 0
    while first < len(layers):
        groups.append(FusionGroup(first, known[first][2]))
        first = groups[-1].last
    return groups[::-1]
