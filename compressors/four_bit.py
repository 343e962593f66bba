"""`4bit`: seven thresholds, fifteen values.

Source: Jiang, Fu, Peng, Zhu, "4Bit-based Gradient Compression Method for Distributed Deep Learning System"
(Computer Science 47(7), 2020). With thresholds X1 < … < X7 and residual e:

    r = g + e;  v = sign(r) * max{X : X < |r|}, 0 if there is none;  send code(v);  e = r - v

Code 0 is zero, 1…7 are -X1…-X7, 9…15 are X1…X7; 8 is never sent. Which seven, is decided per tensor and step:

    groups    the paper: one of three fixed groups, by the mean of |g| (its table 1)
    group1    the first group throughout, for comparison: the "one group" of the paper's figure 8
    running   ours: multiples of a running mean of |g| where it is not 0, over the steps before this one, so
              that it is known before the gradient is read; in the first step over its own. No absolute scale
              is needed. The default, because it measured better than the groups (docs/explanation/accuracy.md).
              A level X is sent from 0.75 X on, the middle between it and the one below, and not from X on:
              rounded to the nearest, e is as often too much as too little. Cut off towards zero, what is
              left has the gradient's sign, and Adam lost by that (docs/explanation/accuracy.md#adam)

Where the paper is silent: a mean of exactly 0.1 or 0.5 takes the first group. See `quantizers.Scale` for the
factor between a summed and a mean gradient, which decides whether the fixed groups work at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ..common.stored import stored
from .base import Fused, StepContext, TensorSpec
from .kernels import Magnitudes, devices
from .payload import CodeFormat, Float32, Float64, QuantizedPayload
from .quantizers import FourBitOptions, Levels
from .thresholds import block_payload, magnitudes

# Table 1 of the paper, in its numbering.
GROUP_1 = (0.04, 0.07, 0.1, 0.2, 0.3, 0.4, 0.6)
GROUP_2 = (0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9)
GROUP_3 = (0.01, 0.03, 0.05, 0.06, 0.07, 0.08, 0.09)

# Levels of `running`, in units of the running mean magnitude. Gradients are heavy-tailed, so the levels grow
# geometrically: truncation to the next lower one then loses at most half of any value above the first.
RUNNING_MULTIPLES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
RUNNING_DECAY = 0.9
# Of a level: from there on it is sent.
RUNNING_SHARE = 0.75


@stored("running-magnitude")
@dataclass(frozen=True, kw_only=True, slots=True)
class RunningMagnitude:
    """Mean of |g| over the elements that were not 0, in all steps so far; those of older steps count less.

    Zeros do not count, because a row of an embedding that no sample touched says nothing about the size of
    the others: with it in the mean, the largest level would lie far below the rows that were touched. For the
    same reason a step that touched nothing changes nothing.

    total, elements: sum of |g| and number of elements, both decayed alike, so that their quotient is a mean.
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
        """0 before anything was touched."""
        return self.total / self.elements if self.elements else 0.0


def levels_of(means: Sequence[float]) -> Float32:
    """For each mean magnitude seven positive, finite, ascending levels, whatever it is: float32, a row
    each."""
    limits = np.finfo(np.float32)
    smallest = float(limits.smallest_normal) / RUNNING_MULTIPLES[0]
    largest = float(limits.max) / RUNNING_MULTIPLES[-1]
    units = np.clip(np.array(means, np.float64), smallest, largest)
    levels: Float32 = (units[:, None] * np.array(RUNNING_MULTIPLES)).astype(np.float32)
    return levels


@dataclass(frozen=True, kw_only=True, slots=True)
class FourBit(Fused):
    """Quantize to fifteen values. State: the running magnitude. Meant to be used with error feedback."""

    options: FourBitOptions = field(default_factory=FourBitOptions)

    def init(self, spec: TensorSpec) -> RunningMagnitude:
        return RunningMagnitude()

    @property
    def share(self) -> float:
        """Of a level: from there on it is sent."""
        return RUNNING_SHARE if self.options.levels is Levels.RUNNING else 1.0

    def compress_blocks(
        self,
        gradients: Sequence[torch.Tensor],
        residual: torch.Tensor,
        left: torch.Tensor,
        states: Sequence[RunningMagnitude],
        samples: int,
    ) -> tuple[QuantizedPayload, list[RunningMagnitude], Float64]:
        """See `base.InBlocks`."""
        format = CodeFormat.SIGNED_4BIT
        running = self.options.levels is Levels.RUNNING
        if running:
            known = [
                state if state.elements else state.updated(devices.magnitudes(gradient))
                for state, gradient in zip(states, gradients, strict=True)
            ]
            levels = levels_of([state.mean for state in known]).reshape(-1)
        else:
            factor = self.options.scale.factor(samples)
            levels = np.tile(np.array([level / factor for level in GROUP_1], np.float32), len(gradients))
        data, totals, nonzero = devices.quantize_blocks(
            format, gradients, residual, left, levels, share=self.share
        )
        following = list(states)
        if running:
            found = map(Magnitudes, totals.tolist(), nonzero.tolist())
            following = [state.updated(each) for state, each in zip(states, found, strict=True)]
        return block_payload(format, gradients, levels, data), following, totals

    def compress_with_residual(
        self,
        gradient: torch.Tensor,
        residual: torch.Tensor | None,
        state: RunningMagnitude,
        context: StepContext,
    ) -> tuple[QuantizedPayload, RunningMagnitude]:
        format = CodeFormat.SIGNED_4BIT
        levels, state = self._levels(gradient, state, context)
        data = devices.quantize(format, gradient, residual, levels, share=self.share)
        return QuantizedPayload(format=format, elements=gradient.numel(), levels=levels, data=data), state

    def _levels(
        self, gradient: torch.Tensor, state: RunningMagnitude, context: StepContext
    ) -> tuple[Float32, RunningMagnitude]:
        if self.options.levels is Levels.RUNNING:
            following = state.updated(magnitudes(gradient, context))
            # The first gradient has none before it.
            return levels_of([(state if state.elements else following).mean])[0], following
        factor = self.options.scale.factor(context.samples)
        group: tuple[float, ...] = GROUP_1
        if self.options.levels is Levels.GROUPS:
            mean = magnitudes(gradient, context).total / max(1, gradient.numel())
            group = choose_group(mean * factor)
        return np.array([level / factor for level in group], np.float32), state


def choose_group(magnitude: float) -> tuple[float, ...]:
    """The paper's table 1: which group fits a tensor of this mean magnitude."""
    if magnitude < 0.1:
        return GROUP_3
    return GROUP_1 if magnitude <= 0.5 else GROUP_2
