"""Fragments of a model, of which each round of local steps exchanges one (`local`, Streaming)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Changes = Sequence[torch.Tensor | None]


def fragments_of(sizes: Sequence[int], count: int) -> list[int]:
    """Divide tensors into fragments of about equal size.

    Each tensor, from the largest on, goes to the fragment that is the smallest so far.

    Args:
        sizes: number of elements of each tensor.
        count: number of fragments; as many as tensors, if there are fewer of those.

    Returns:
        The fragment of each tensor, from 0.
    """
    loads, found = [0] * max(1, min(count, len(sizes))), [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        found[index] = loads.index(min(loads))
        loads[found[index]] += sizes[index]
    return found


def divide(
    changes: Changes, carried: Changes, fragments: Sequence[int], version: int, *, everything: bool
) -> tuple[Changes, Changes]:
    """Add a round's changes to the carried ones, and divide them into those whose turn it is, and the others.

    Args:
        changes: changes of the round, by tensor.
        carried: changes of earlier rounds that wait for their turn, by tensor; empty for none.
        fragments: fragment of each tensor, from 0.
        version: version of the round: its fragment is the version modulo their number.
        everything: whether it is the turn of all fragments, because the worker leaves.

    Returns:
        The changes to push, and those to carry on; an entry is None in one of them. No tensor is altered.
    """
    count = max(fragments, default=0) + 1
    if count == 1:
        return changes, ()
    total = list(changes)
    for index, before in enumerate(carried):
        change = total[index]
        if before is not None:
            total[index] = before if change is None else before.to(change.device) + change
    due = [everything or fragment == version % count for fragment in fragments]
    pairs = list(zip(total, due, strict=True))
    return [each if now else None for each, now in pairs], [None if now else each for each, now in pairs]
