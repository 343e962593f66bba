"""Gradient coding: a sum over all parts of a batch that tolerates a few stragglers among the members.

The batch is divided into n parts, one for each member. Member p computes the gradient sums G of parts p, p+1,
…, p+s (mod n) and pushes one combination of them, B[p] · G. The rows of B are chosen so that the pushes of
any n - s members suffice for the sum of all parts: there are weights a with a · B[present] = (1, …, 1).

Source: Tandon et al., "Gradient Coding: Avoiding Stragglers in Distributed Learning" (ICML 2017), cyclic
repetition, algorithm 2. It takes H with s rows whose columns add up to 0, any s columns independent. Row p of
B is the vector that H maps to 0 and that is nonzero at s + 1 indices only.

The paper draws H at random. An unlucky H has large weights, thousands for 16 members, which multiply the
errors of rounding and compression. This module therefore fixes B.

1. Where s + 1 divides n, B holds ones. Members p, p+s+1, p+2(s+1), … share no part and together cover every
   part. There are s + 1 such classes, so n - s members contain at least one whole class.
2. Otherwise the rows of H are the s highest frequencies of n points, after Raviv et al., "Gradient Coding
   from Cyclic MDS Codes and Expander Graphs" (ICML 2018). Any s columns are independent and well conditioned.
   Where n + s is even the frequencies lie between the whole ones, and the columns have to be scaled to add up
   to 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]

ROUNDING = 1e-10  # a weight of a smaller magnitude is 0


@dataclass(frozen=True, eq=False, slots=True)
class StragglerCode:
    """A gradient code for one number of members: the coefficients of their pushes, and how to decode the sum.

    Attributes:
        matrix: coefficient B of each part in each member's push, shape (members, parts), of equal sides.
    """

    matrix: Float64
    stragglers: int  # number s of members whose pushes may be missing

    @property
    def members(self) -> int:
        """Number of members, which equals the number of parts."""
        return len(self.matrix)

    def coefficients(self, member: int) -> list[float]:
        """Return the factors by which a member multiplies the gradient sums of its shares of the batch.

        They are in the order of `parts_of`; the push is the sum of the products. Their magnitudes are 1 on
        average, so that a push is about as large as a sum over the member's samples."""
        return [float(self.matrix[member, part]) for part in parts_of(member, self.members, self.stragglers)]

    def decoding_weights(self, present: Sequence[int]) -> list[float]:
        """Return the weights with which the present members' pushes add up to the sum over all parts.

        There is one for each member, in the order of `present`. Of all possible weights, these have the
        smallest norm.

        Raises:
            ValueError: if fewer than members - stragglers members are present.
        """
        fewest = self.members - self.stragglers
        if len(present) < fewest:
            raise ValueError(f"expected at least {fewest} of {self.members} members, got {len(present)}")
        rows = self.matrix[list(present)]
        weights = np.linalg.lstsq(rows.T, np.ones(self.members), rcond=None)[0]
        return [float(weight) if abs(weight) > ROUNDING else 0.0 for weight in weights]


def parts_of(member: int, members: int, stragglers: int) -> list[int]:
    """Return the parts whose gradients `member` computes, in the order of computation.

    Args:
        member: number of the member, from 0.
        members: number of members and of parts.
        stragglers: number of members whose pushes may be missing.
    """
    return [(member + step) % members for step in range(stragglers + 1)]


@lru_cache(maxsize=64)
def straggler_code(members: int, stragglers: int) -> StragglerCode:
    """Return the gradient code for this number of members and stragglers.

    Equal arguments give equal codes on every machine, up to rounding.

    Raises:
        ValueError: unless 0 <= stragglers < members.
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
    """Return H: sampled cosines and sines with frequencies symmetric about the highest one, n / 2."""
    places = np.arange(members)
    signs = (-1.0) ** places  # the highest frequency
    offsets = np.arange(stragglers // 2) + (1.0 if stragglers % 2 else 0.5)
    angles = 2 * np.pi * np.outer(offsets, places) / members
    rows = [*(np.cos(angles) * signs), *(np.sin(angles) * signs)]
    if stragglers % 2:
        rows.append(signs)
    null = np.stack(rows)
    if (members + stragglers) % 2 == 0:
        # Between whole frequencies, the columns add up to 0 only if half a sine wave weights them.
        null = null * np.sin(np.pi * (places + 0.5) / members)
    return null
