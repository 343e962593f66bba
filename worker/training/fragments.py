"""Fragments of a model, of which each round of local steps exchanges one (`local:fragments=F`).

Source: Streaming DiLoCo (Douillard et al., "Streaming DiLoCo with overlapping communication", 2025). The
tensors are divided into F fragments, and the round of version v exchanges the changes of fragment v mod F
alone. A worker carries its changes of the others into the next round: it begins at w_global less the carried
changes, and pushes a fragment's changes of all rounds since its last turn. So a fragment is exchanged after F
rounds, and a round of H / F steps moves an F-th of the bytes. A worker that leaves pushes all fragments. One
that returns at another version has lost its carried changes, like its residual. At the end of the job the
last changes of F - 1 fragments are not in the model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...compressors import NonFiniteGradient
from ...proto import messages as m
from ..session.session import Session
from .step import all_finite
from .variant import Changes, Variant, subtract


class Fragments(Variant):
    """Exchanges one of `count` fragments of the session's model in each round.

    The session holds the carried changes, because they count as held back, like a residual.
    """

    def __init__(self, session: Session, count: int) -> None:
        self._session = session
        self._of = fragments_of([each.numel() for each in session.replica.parameters], count)
        self._before: Changes = ()  # the changes carried before the present round

    def start(self, assignment: m.Assignment, parameters: Sequence[torch.Tensor]) -> bool:
        return subtract(parameters, self._session.compression.carried)

    def carry(self, changes: Changes, version: int, *, everything: bool) -> Changes:
        self._before = self._session.compression.carried
        count = max(self._of, default=0) + 1
        total = list(changes)
        for index, before in enumerate(self._before):
            change = total[index]
            if before is not None:
                total[index] = before if change is None else before.to(change.device) + change
        due = [everything or count == 1 or fragment == version % count for fragment in self._of]
        kept = [None if now else each for each, now in zip(total, due, strict=True)]
        if not all_finite([each for each in kept if each is not None]):
            raise NonFiniteGradient("a fragment that is not exchanged yet")
        self._session.compression.carried = kept
        return [each if now else None for each, now in zip(total, due, strict=True)]

    def drop(self) -> None:
        self._session.compression.carried = self._before


def fragments_of(sizes: Sequence[int], count: int) -> list[int]:
    """Divide tensors into fragments of about equal size.

    Each tensor, from the largest on, goes to the fragment that is the smallest so far. Returns the fragment
    of each tensor, from 0. count: number of fragments; as many as tensors, if there are fewer of those.
    """
    loads, found = [0] * max(1, min(count, len(sizes))), [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        found[index] = loads.index(min(loads))
        loads[found[index]] += sizes[index]
    return found
