"""Clips by the global norm like `torch.nn.utils.clip_grad_norm_`: g <- g · min(1, limit / ‖g‖).

torch computes norms of float32 in float32, on several threads. Here the norm is accumulated in float64 over
blocks of tensors and then rounded to float32. Neither parts nor threads therefore affect its bits, and the
result differs from torch's in the last bits.

The norm is that of the whole model. With `--clip-norm` all parts are therefore summed before the first one is
stepped, and no part is stepped early.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch

from ...compressors import norm

BLOCK = 1 << 14  # elements: few enough that torch computes the norm on one thread


def clip(gradient: torch.Tensor, starts: Sequence[int], limit: float, weight: float = 1.0) -> float:
    """Scale a gradient in place such that its norm is at most `limit`.

    Args:
        gradient: gradient of the whole model, times `weight`: float32, shape (elements,).
        starts: first element of each tensor, and the end of the last one.
        limit: largest Euclidean norm, above 0.
        weight: factor that the gradient has been multiplied with, above 0; `limit` holds for the gradient
            without it.

    Returns:
        The norm before clipping, of the gradient without the factor.
    """
    blocks = [
        norm(gradient[first : min(first + BLOCK, end)])
        for start, end in pairwise(starts)
        for first in range(start, end, BLOCK)
    ]
    found = math.hypot(*blocks) / weight
    gradient.mul_(clip_factor(found, limit))
    return found


def clip_factor(norm: float, limit: float) -> float:
    """Return the factor, rounded to float32, by which a gradient of this norm is clipped to `limit`."""
    rounded = torch.tensor(norm, dtype=torch.float32, device="cpu")
    return float(torch.clamp(limit / (rounded + 1e-6), max=1.0))
