"""Triton versions of functions in `cpu` and `selection`: the same names, the same bits.

They take torch tensors on one device, so that a gradient is compressed before it is copied to the host. They
need Triton, which the extra `cuda` installs. Without a GPU they run slowly in Triton's interpreter, if
TRITON_INTERPRET=1 was set before Triton was imported; tests use this on machines without a GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..payload import CodeFormat, Float32
from . import triton_loops as loops
from .checks import check_keep, check_signed

QUANTIZE_BLOCK = 1024
SELECT_BLOCK = 2048
BLOCKS_PER_PROGRAM = 16
# Shift and width of each of the three digits of a 32-bit key, highest digit first.
PARTS = ((21, 11), (10, 11), (0, 10))


def quantize(
    format: CodeFormat,
    gradient: torch.Tensor,
    residual: torch.Tensor,
    levels: Float32,
    data: torch.Tensor,
    *,
    share: float = 1.0,
) -> None:
    """Quantize gradient + residual on the GPU, as `cpu.quantize` does; the levels are on the host."""
    elements = gradient.numel()
    _check("gradient", gradient, torch.float32, elements)
    _check("residual", residual, torch.float32, elements)
    _check("data", data, torch.uint8, format.code_bytes(elements))
    check_signed(format)
    if not elements:
        return
    least = levels if format.bits == 2 else np.float32(share) * levels
    table, begins = (torch.from_numpy(each).to(gradient.device) for each in (levels, least))
    _launch(
        *(loops.quantize, -(-elements // QUANTIZE_BLOCK)),
        *(gradient, residual, table, begins, data.view(torch.int32), elements),
        BITS=format.bits,
        BLOCK=QUANTIZE_BLOCK,
    )


def select(values: torch.Tensor, keep: int, *, center: float = 0.0) -> torch.Tensor:
    """Return the indices of the `keep` elements with the largest |x - center|, int32, ascending.

    With center 0 no zeros are selected. Of equal magnitudes the lower index is selected. Three passes find
    the threshold, and two write the indices.
    """
    _check("values", values, torch.float32, values.numel())
    check_keep(keep, values.numel())
    center = float(np.float32(center))
    threshold, above = _threshold(values, keep, center, ordered=False) if keep else (0, 0)
    if threshold == 0 and not center:
        keep = above
    indices = torch.empty(keep, dtype=torch.int32, device=values.device)
    if not keep:
        return indices
    blocks = -(-values.numel() // SELECT_BLOCK)
    counts = torch.zeros((2, blocks), dtype=torch.int32, device=values.device)
    arguments = values, values.numel(), center, threshold
    _launch(loops.count, blocks, *arguments, counts[0], counts[1], BLOCK=SELECT_BLOCK)
    before = (counts.cumsum(1) - counts).to(torch.int32)
    _launch(
        *(loops.write, blocks, *arguments, before[0], before[1], keep - above, indices), BLOCK=SELECT_BLOCK
    )
    return indices


def add_and_select(gradient: torch.Tensor, residual: torch.Tensor, keep: int) -> torch.Tensor:
    """Replace `residual` by the saturating sum gradient + residual, and `select` the `keep` largest
    magnitudes in it."""
    _check("gradient", gradient, torch.float32, residual.numel())
    _check("residual", residual, torch.float32, residual.numel())
    if residual.numel():
        blocks = -(-residual.numel() // QUANTIZE_BLOCK)
        _launch(loops.add, blocks, gradient, residual, residual.numel(), BLOCK=QUANTIZE_BLOCK)
    return select(residual, keep)


def median(values: torch.Tensor) -> float:
    """Return the median as `selection.median` does."""
    _check("values", values, torch.float32, values.numel())
    if not values.numel():
        raise ValueError("values: expected at least one element, got none")
    rank = values.numel() - (values.numel() - 1) // 2
    key, _ = _threshold(values, rank, 0.0, ordered=True)
    bits = key - 0x80000000 if key >= 0x80000000 else 0xFFFFFFFF - key
    return float(np.array([bits], np.uint32).view(np.float32)[0])


def _threshold(values: torch.Tensor, rank: int, center: float, *, ordered: bool) -> tuple[int, int]:
    """Return the key of the element of rank `rank`, 1 for the highest, and the number of keys above it.

    ordered: True to compare x itself; False to compare |x - center|.
    """
    prefix, above = 0, 0
    programs = -(-values.numel() // (SELECT_BLOCK * BLOCKS_PER_PROGRAM))
    for shift, width in PARTS:
        counts = torch.zeros(loops.BINS, dtype=torch.int32, device=values.device)
        _launch(
            *(loops.histogram, programs, values, values.numel(), center, counts, prefix),
            SHIFT=shift,
            WIDTH=width,
            ORDERED=ordered,
            BLOCK=SELECT_BLOCK,
            BLOCKS=BLOCKS_PER_PROGRAM,
        )
        from_top = counts[: 1 << width].flip(0).cumsum(0).cpu().numpy()
        steps = int(np.searchsorted(from_top, rank - above))
        above += int(from_top[steps - 1]) if steps else 0
        prefix = (prefix << width) + (1 << width) - 1 - steps
    return prefix, above


def _check(name: str, tensor: torch.Tensor, dtype: torch.dtype, size: int) -> None:
    if tensor.dtype != dtype or tensor.shape != (size,) or not tensor.is_contiguous():
        got = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
        raise ValueError(f"{name}: expected contiguous {dtype} of shape ({size},), got {got}")


def _launch(kernel: Any, programs: int, *arguments: object, **constants: object) -> None:
    kernel[(programs,)](*arguments, **constants)
