"""Delay compensation: g + λ g² (w - w_base), which corrects a gradient to first order for the movement of the
parameters since it was computed.

Source: Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation" (ICML 2017).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch


class DelayCompensation:
    """The factor λ, and copies of the replica at each version at which a gradient is being computed. With λ =
    0 nothing is copied."""

    def __init__(self, factor: float) -> None:
        """
        Args:
            factor: λ, at least 0."""
        self._factor = factor
        self._bases: dict[int, torch.Tensor] = {}  # replicas by version

    def correct(
        self, gradient: torch.Tensor, replica: torch.Tensor, here: slice, base_version: int, weight: float
    ) -> None:
        """Replace the gradient weight · g, in place, by weight · (g + λ g² (w - w_base)).

        Args:
            gradient: gradient of a range of elements: float32, one axis.
            replica: w, the replica's values of the range.
            here: the range, in flat order.
            base_version: version that the gradient was computed at.
            weight: weight of the push.
        """
        moved = replica - self._bases[base_version][here]
        gradient.add_(moved.mul_(gradient).mul_(gradient), alpha=self._factor / weight)

    def keep(self, newest: int, replica: torch.Tensor, bases: frozenset[int]) -> None:
        """Keep a copy of the newest version, and drop versions at which no gradient is being computed. bases:
        versions at which one is."""
        if not self._factor:
            return
        for version in list(self._bases):
            if version < newest - 1 and version not in bases:
                del self._bases[version]
        self._bases[newest] = replica.clone()

    def image(self) -> dict[int, torch.Tensor]:
        """Return the kept versions as copies."""
        return {version: base.clone() for version, base in self._bases.items()}

    def restore(self, image: Mapping[int, torch.Tensor]) -> None:
        """Replace the kept versions by those that `image` returned, which belong to this object
        afterwards."""
        self._bases = dict(image)
