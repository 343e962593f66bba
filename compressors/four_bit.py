"""`4bit`: seven thresholds, fifteen values.

Source: Jiang, Fu, Peng, Zhu, "4Bit-based Gradient Compression Method for Distributed Deep Learning System"
(Computer Science 47(7), 2020). With thresholds X1 < … < X7 and residual e:

    r = g + e;  v = sign(r) * max{X : X < |r|}, 0 if there is none;  send code(v);  e = r - v

Code 0 is zero, 1…7 are -X1…-X7, 9…15 are X1…X7; 8 is never sent. The seven thresholds are chosen per tensor
and step:

    groups:   the paper's rule. One of three fixed groups, by the mean of |g| (its table 1).
    group1:   the first group throughout, for comparison: the "one group" of the paper's figure 8.
    running:  ours, and the default, because it measured better than the groups
              (docs/explanation/accuracy.md). Multiples of a running mean of |g| over the previous steps,
              zeros left out. It is known before the gradient is read; the first step takes its own mean. No
              absolute scale is needed.

              A level X is sent from 0.75 X on, the middle between it and the level below, and not from X on.
              For the first level the middle between it and 0 would be 0.5 X: that was tried, and did not
              change losses (records/2026-11-4bit-first-level.md). Rounded to the nearest, the error
              has either sign equally often. Cut off towards zero, the residual has the gradient's sign, and
              Adam lost by that (docs/explanation/accuracy.md#adam).

Where the paper is silent: a mean of exactly 0.1 or 0.5 takes the first group. See `quantizers.Scale` for the
factor between a summed and a mean gradient, which decides whether the fixed groups work at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ..common.stored import stored
from .base import TensorSpec
from .kernels import Magnitudes, devices
from .payload import CodeFormat, Float32, Float64, QuantizedPayload
from .quantizers import FourBitOptions, Levels
from .thresholds import OnePass, block_payload

# Table 1 of the paper, in its numbering.
GROUP_1 = (0.04, 0.07, 0.1, 0.2, 0.3, 0.4, 0.6)
GROUP_2 = (0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9)
GROUP_3 = (0.01, 0.03, 0.05, 0.06, 0.07, 0.08, 0.09)

# Levels of `running`, in units of the running mean magnitude. Gradients are heavy-tailed, so the levels grow
# geometrically: truncation to the next lower one then loses at most half of any value above the first.
RUNNING_MULTIPLES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
RUNNING_DECAY = 0.9
# A level is sent for magnitudes from this fraction of it on.
RUNNING_SHARE = 0.75


@stored("running-magnitude")
@dataclass(frozen=True, kw_only=True, slots=True)
class RunningMagnitude:
    """Running mean of |g| over the elements that were not 0, in all steps so far; older steps weigh less.

    Zeros do not count, because a row of an embedding that no sample touched says nothing about the size of
    the other rows. With it in the mean, the largest level would lie far below the rows that were touched. For
    the same reason a gradient of zeros changes nothing.

    Attributes:
        total: sum of |g|, decayed.
        elements: number of elements that were not 0, decayed by the same factor, so that the quotient is a
            mean.
    """

    total: float = 0.0
    elements: float = 0.0

    def updated(self, magnitudes: Magnitudes) -> RunningMagnitude:
        if not magnitudes.nonzero:
            return self
        return RunningMagnitude(
            total=RUNNING_DECAY * self.total + magnitudes.total,
            elements=RUNNING_DECAY * self.elements + magnitudes.nonzero,
        )

    @property
    def mean(self) -> float:
        return self.total / self.elements if self.elements else 0.0


def levels_of(means: Sequence[float]) -> Float32:
    """Return seven levels for each mean magnitude: float32, shape (means, 7), ascending within a row,
    positive and finite for every mean."""
    limits = np.finfo(np.float32)
    smallest = float(limits.smallest_normal) / RUNNING_MULTIPLES[0]
    largest = float(limits.max) / RUNNING_MULTIPLES[-1]
    units = np.clip(np.array(means, np.float64), smallest, largest)
    levels: Float32 = (units[:, None] * np.array(RUNNING_MULTIPLES)).astype(np.float32)
    return levels


@dataclass(frozen=True, kw_only=True, slots=True)
class FourBit(OnePass):
    """The compressor `4bit`, meant to be used with error feedback. Its state is the running magnitude."""

    options: FourBitOptions = field(default_factory=FourBitOptions)

    def init(self, spec: TensorSpec) -> RunningMagnitude:
        return RunningMagnitude()

    @property
    def share(self) -> float:
        return RUNNING_SHARE if self.options.levels is Levels.RUNNING else 1.0

    def compress_blocks(
        self,
        gradients: Sequence[torch.Tensor],
        residual: torch.Tensor | None,
        left: torch.Tensor | None,
        states: Sequence[RunningMagnitude],
        samples: int,
    ) -> tuple[QuantizedPayload, list[RunningMagnitude], Float64]:
        format = CodeFormat.SIGNED_4BIT
        levels = self._levels(gradients, states, samples).reshape(-1)
        data, totals, nonzero = devices.quantize_blocks(
            format, gradients, residual, left, levels, share=self.share
        )
        following = list(states)
        if self.options.levels is Levels.RUNNING:
            found = map(Magnitudes, totals.tolist(), nonzero.tolist())
            following = [state.updated(each) for state, each in zip(states, found, strict=True)]
        return block_payload(format, gradients, levels, data), following, totals

    def _levels(
        self, gradients: Sequence[torch.Tensor], states: Sequence[RunningMagnitude], samples: int
    ) -> Float32:
        if self.options.levels is Levels.RUNNING:
            # The first gradient has no previous mean, and takes its own.
            known = [
                state if state.elements else state.updated(devices.magnitudes(gradient))
                for state, gradient in zip(states, gradients, strict=True)
            ]
            return levels_of([state.mean for state in known])
        factor = self.options.scale.factor(samples)
        groups: list[tuple[float, ...]] = [GROUP_1] * len(gradients)
        if self.options.levels is Levels.GROUPS:
            totals = [devices.magnitudes(gradient).total for gradient in gradients]
            means = [total / max(1, each.numel()) for total, each in zip(totals, gradients, strict=True)]
            groups = [choose_group(mean * factor) for mean in means]
        return np.array([[level / factor for level in group] for group in groups], np.float32)


def choose_group(magnitude: float) -> tuple[float, ...]:
    if magnitude < 0.1:
        return GROUP_3
    return GROUP_1 if magnitude <= 0.5 else GROUP_2
