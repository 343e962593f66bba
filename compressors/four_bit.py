"""`4bit`: seven thresholds, fifteen values.

Source: Jiang, Fu, Peng, Zhu, "4Bit-based Gradient Compression Method for Distributed Deep Learning System"
(Computer Science 47(7), 2020). With thresholds X1 < … < X7 and residual e:

    r = g + e;  v = sign(r) * max{X : X < |r|}, 0 if there is none;  send code(v);  e = r - v

Code 0 is zero, 1…7 are -X1…-X7, 9…15 are X1…X7; 8 is never sent. Which seven, is decided per tensor and step:

    groups    the paper: one of three fixed groups, by the mean of |g| (its table 1)
    group1    the first group throughout, for comparison: the "one group" of the paper's figure 8
    running   ours: multiples of a running mean of |g| where it is not 0, so no absolute scale is needed; the
              default, because it measured better than the groups (docs/accuracy.md)

Where the paper is silent: a mean of exactly 0.1 or 0.5 takes the first group. See `thresholds.Scale` for the
factor between a summed and a mean gradient, which decides whether the fixed groups work at all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

import numpy as np
import torch

from .base import Fused, StepContext, TensorSpec
from .kernels import Magnitudes, devices
from .payload import CodeFormat, Float32, QuantizedPayload
from .thresholds import Scale, magnitudes


class Levels(StrEnum):
    """How the seven thresholds are chosen; see the head of this file."""

    GROUPS = "groups"
    GROUP1 = "group1"
    RUNNING = "running"


# Table 1 of the paper, in its numbering.
GROUP_1 = (0.04, 0.07, 0.1, 0.2, 0.3, 0.4, 0.6)
GROUP_2 = (0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9)
GROUP_3 = (0.01, 0.03, 0.05, 0.06, 0.07, 0.08, 0.09)

# Levels of `running`, in units of the running mean magnitude. Gradients are heavy-tailed, so the levels grow
# geometrically: truncation to the next lower one then loses at most half of any value above the first.
RUNNING_MULTIPLES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
RUNNING_DECAY = 0.9


@dataclass(frozen=True, kw_only=True, slots=True)
class FourBitOptions:
    """levels: how thresholds are chosen. scale: what fixed ones are compared with; no effect on running."""

    levels: Levels = Levels.RUNNING
    scale: Scale = Scale.SUM


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

    def levels(self) -> Float32:
        """Seven positive, finite, ascending levels, whatever the magnitude; float32."""
        limits = np.finfo(np.float32)
        smallest = float(limits.smallest_normal) / RUNNING_MULTIPLES[0]
        largest = float(limits.max) / RUNNING_MULTIPLES[-1]
        mean = self.total / self.elements if self.elements else 0.0
        unit = min(max(mean, smallest), largest)
        return np.array([multiple * unit for multiple in RUNNING_MULTIPLES], np.float32)


@dataclass(frozen=True, kw_only=True, slots=True)
class FourBit(Fused):
    """Quantize to fifteen values. State: the running magnitude. Meant to be used with error feedback."""

    options: FourBitOptions = field(default_factory=FourBitOptions)
    on_gpu: ClassVar[bool] = True

    def init(self, spec: TensorSpec) -> RunningMagnitude:
        return RunningMagnitude()

    def compress_with_residual(
        self,
        gradient: torch.Tensor,
        residual: torch.Tensor | None,
        state: RunningMagnitude,
        context: StepContext,
    ) -> tuple[QuantizedPayload, RunningMagnitude]:
        format = CodeFormat.SIGNED_4BIT
        levels, state = self._levels(gradient, state, context)
        data = devices.quantize(format, gradient, residual, levels)
        return QuantizedPayload(format=format, elements=gradient.numel(), levels=levels, data=data), state

    def _levels(
        self, gradient: torch.Tensor, state: RunningMagnitude, context: StepContext
    ) -> tuple[Float32, RunningMagnitude]:
        if self.options.levels is Levels.RUNNING:
            state = state.updated(magnitudes(gradient, context))
            return state.levels(), state
        factor = self.options.scale.factor(context)
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
