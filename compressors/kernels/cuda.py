"""The kernels of `reference` and `selection_reference` on a GPU: the same functions, the same bits.

They take torch tensors that lie on one device, so that a gradient is compressed before it is copied to the
host. They need Triton, which the extra `cuda` brings. Without a GPU they run in Triton's interpreter, slowly,
if TRITON_INTERPRET=1 was set before Triton was imported; that is how they are tested where there is none.
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
# The 32 bits of a key, highest first: where each part begins and how wide it is.
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
    """See `reference.quantize`. data: uint8, `format.code_bytes(elements)` long."""
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
    """The `keep` elements with the largest |x - center|: int32 indices, ascending. Around 0, no zeros.

    Of equal scores the lower index is taken. Three passes find the threshold, two write the indices.
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
    """Leave the saturating sum in `residual` and select from it by magnitude."""
    _check("gradient", gradient, torch.float32, residual.numel())
    _check("residual", residual, torch.float32, residual.numel())
    if residual.numel():
        blocks = -(-residual.numel() // QUANTIZE_BLOCK)
        _launch(loops.add, blocks, gradient, residual, residual.numel(), BLOCK=QUANTIZE_BLOCK)
    return select(residual, keep)


def median(values: torch.Tensor) -> float:
    """The element in the middle of the sorted order; of an even number the lower of two."""
    _check("values", values, torch.float32, values.numel())
    if not values.numel():
        raise ValueError("values: expected at least one element")
    rank = values.numel() - (values.numel() - 1) // 2
    key, _ = _threshold(values, rank, 0.0, ordered=True)
    bits = key - 0x80000000 if key >= 0x80000000 else 0xFFFFFFFF - key
    return float(np.array([bits], np.uint32).view(np.float32)[0])


def _threshold(values: torch.Tensor, rank: int, center: float, *, ordered: bool) -> tuple[int, int]:
    """The key of the element of this rank, from 1 for the highest, and how many keys are higher."""
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
    """Raise `ValueError` unless a kernel may take `tensor` for `size` consecutive elements of `dtype`."""
    if tensor.dtype != dtype or tensor.shape != (size,) or not tensor.is_contiguous():
        got = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
        raise ValueError(f"{name}: expected contiguous {dtype} of shape ({size},), got {got}")


def _launch(kernel: Any, programs: int, *arguments: object, **constants: object) -> None:
    kernel[(programs,)](*arguments, **constants)
