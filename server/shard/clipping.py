"""Clipping by the global norm, as `torch.nn.utils.clip_grad_norm_` has it: g <- g · min(1, limit / ‖g‖).

torch takes norms of float32 in float32, on as many threads as there are. Here the norm is accumulated in
float64 over blocks of tensors, so that neither parts nor threads have a say in its bits, and rounded to
float32 then: the two differ in its last bits.

The norm is that of the whole model, so all parts are summed before the first is stepped: with `--clip-norm`
parts are not stepped one by one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch

from ...compressors import norm

BLOCK = 1 << 14  # elements, of which torch finds the norm on one thread


def clip(gradient: torch.Tensor, starts: Sequence[int], limit: float, weight: float = 1.0) -> float:
    """Scale a gradient in place.

    Args:
        gradient: of the whole model times a weight: float32, shape (elements,).
        starts: of each tensor in it, and the end of the last.
        limit: of the norm, above 0.
        weight: that the gradient was multiplied with, above 0; the norm is that of the gradient itself.

    Returns the norm before.
    """
    blocks = [
        norm(gradient[first : min(first + BLOCK, end)])
        for start, end in pairwise(starts)
        for first in range(start, end, BLOCK)
    ]
    found = math.hypot(*blocks) / weight
    gradient.mul_(torch.clamp(limit / (torch.tensor(found, dtype=torch.float32) + 1e-6), max=1.0))
    return found
