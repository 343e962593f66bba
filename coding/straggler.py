"""Gradient coding: a sum over all parts of a batch that can do without any few of those who compute it.

The batch is divided in n parts. Member p computes the gradient sums G of parts p, p+1, …, p+s (mod n) and
pushes one combination of them, B[p] · G. The rows of B are such that from any n - s pushes the sum of all
parts comes out: there are weights a with a · B[present] = (1, …, 1).

Source: Tandon et al., "Gradient Coding: Avoiding Stragglers in Distributed Learning" (ICML 2017), cyclic
repetition, algorithm 2: take H with s rows whose columns add up to 0, any s of them independent; row p of B
is the vector on its s + 1 places that H maps to 0.

The paper draws H at random. The weights of an unlucky one are large, thousands for 16 members, and rounding
and compression are multiplied with them. So B is fixed here. Where s + 1 divides n it holds ones: members
p, p+s+1, p+2(s+1), … share nothing, together they cover every part, and of any n - s members s + 1 such
classes cannot all lack one. Otherwise the rows of H are the s highest frequencies of n points, after Raviv
et al., "Gradient Coding from Cyclic MDS Codes and Expander Graphs" (ICML 2018): any s columns of those are
independent, and far from dependent. Where n + s is even they lie between the whole frequencies, and the
columns have to be scaled to add up to 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]

ROUNDING = 1e-10  # a weight below this is 0


@dataclass(frozen=True, eq=False, slots=True)
class StragglerCode:
    """matrix: B, shape (members, parts), as many of both. stragglers: s."""

    matrix: Float64
    stragglers: int

    @property
    def members(self) -> int:
        return len(self.matrix)

    def coefficients(self, member: int) -> list[float]:
        """Of the gradient sums of `parts_of` in what a member pushes. Their magnitudes are 1 on average, so
        that a push is about as large as a sum over its samples."""
        return [float(self.matrix[member, part]) for part in parts_of(member, self.members, self.stragglers)]

    def decoding_weights(self, present: Sequence[int]) -> list[float]:
        """What the pushes of these members are to be multiplied with, so that they add up to the sum over all
        parts. Of all that do, the smallest.

        Raises ValueError if they are fewer than members - stragglers.
        """
        fewest = self.members - self.stragglers
        if len(present) < fewest:
            raise ValueError(f"expected at least {fewest} of {self.members} members, got {len(present)}")
        rows = self.matrix[list(present)]
        weights = np.linalg.lstsq(rows.T, np.ones(self.members), rcond=None)[0]
        return [float(weight) if abs(weight) > ROUNDING else 0.0 for weight in weights]


def parts_of(member: int, members: int, stragglers: int) -> list[int]:
    """The parts that a member computes, in the order in which it does."""
    return [(member + step) % members for step in range(stragglers + 1)]


@lru_cache(maxsize=64)
def straggler_code(members: int, stragglers: int) -> StragglerCode:
    """The same for the same numbers, on every machine up to rounding.

    Raises ValueError unless 0 <= stragglers < members.
    """
    if not 0 <= stragglers < members:
        raise ValueError(f"stragglers: expected 0 to {members - 1} of {members} members, got {stragglers}")
    matrix = np.zeros((members, members))
    plain = members % (stragglers + 1) == 0
    null = np.empty((0, members)) if plain else _frequencies(members, stragglers)
    for member in range(members):
        first, *others = parts = parts_of(member, members, stragglers)
        if plain:
            matrix[member, parts] = 1.0
        else:
            row = np.concatenate([[1.0], -np.linalg.solve(null[:, others], null[:, first])])
            matrix[member, parts] = row * len(row) / np.abs(row).sum()
    return StragglerCode(matrix, stragglers)


def _frequencies(members: int, stragglers: int) -> Float64:
    """H: the frequencies of n points that lie symmetrically about the highest one, n / 2."""
    places = np.arange(members)
    signs = (-1.0) ** places  # the highest one
    offsets = np.arange(stragglers // 2) + (1.0 if stragglers % 2 else 0.5)
    angles = 2 * np.pi * np.outer(offsets, places) / members
    rows = [*(np.cos(angles) * signs), *(np.sin(angles) * signs)]
    if stragglers % 2:
        rows.append(signs)
    null = np.stack(rows)
    if (members + stragglers) % 2 == 0:
        # The columns do not add up to 0, but do if they are weighted with half of a wave.
        null = null * np.sin(np.pi * (places + 0.5) / members)
    return null
