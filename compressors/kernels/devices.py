"""Kernels over torch tensors on any device: compiled by numba for the CPU, by Triton for a GPU.

Results are on the host and already small: codes, or the selected elements. So a gradient on a GPU is
compressed before it is copied. Both implementations give the same bits, except for `magnitudes`, whose sum a
GPU adds in another order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec

import numpy as np
import torch

from ..payload import Bytes, CodeFormat, Float32, Float64, Int64, code_words
from . import cpu, selection
from .lazy import cuda
from .shared import FLOAT32_MAX, Indices, Magnitudes, Selection

_LARGEST = float(FLOAT32_MAX)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def has_kernels_for(tensor: torch.Tensor) -> bool:
    """Return True if the functions in this file accept the tensor on its device; otherwise copy it to the
    host first.
    """
    return tensor.device.type == "cpu" or (tensor.is_cuda and _has_triton())


def on_gpu(what: torch.Tensor | torch.device) -> bool:
    return what.is_cuda if isinstance(what, torch.Tensor) else what.type == "cuda"


def magnitudes(values: torch.Tensor) -> Magnitudes:
    """Return the sum of absolute values and the number of non-zero elements of `values`."""
    if not on_gpu(values):
        return cpu.magnitudes(values.numpy())
    # Both numbers in one copy to the host, because each copy waits for the GPU.
    parts = values.abs().sum(dtype=torch.float64), values.count_nonzero().to(torch.float64)
    total, nonzero = torch.stack(parts).cpu().numpy()
    return Magnitudes(float(total), int(nonzero))


def sampled_magnitudes(tensors: Sequence[torch.Tensor]) -> tuple[Float64, Int64]:
    """Return the sum of absolute values and the number of non-zero elements of each tensor, in one call.

    A tensor of more than `selection.SMALL` elements is measured by the sample that `selection.sample` takes.

    tensors: contiguous float32 tensors of one dimension, on the host.
    """
    _check_blocks(tensors, torch.device("cpu"))
    sizes = np.array([tensor.numel() for tensor in tensors], np.int64)
    places = np.array([tensor.data_ptr() for tensor in tensors], np.uint64)
    return cpu.sampled_magnitudes(places, sizes, selection.SMALL, selection.STRIDE)


def finite(values: torch.Tensor) -> bool:
    """Return True if `values`, of one dimension, holds neither an infinity nor a NaN."""
    return math.isfinite(magnitudes(values).total)


def quantize_blocks(
    format: CodeFormat,
    gradients: Sequence[torch.Tensor],
    residual: torch.Tensor | None,
    left: torch.Tensor | None,
    levels: Float32,
    *,
    share: float = 1.0,
) -> tuple[Bytes, Float64, Int64]:
    """Quantize several tensors in one pass, as `cpu.quantize_at` does; return the packed codes as well.

    All tensors are contiguous float32 of one dimension, on the same device. A residual of None stands for
    zeros, and the errors are dropped.
    """
    first = gradients[0] if residual is None else residual
    _check_blocks(gradients, first.device)
    sizes = np.array([gradient.numel() for gradient in gradients], np.int64)
    if on_gpu(first):
        if residual is None or left is None:
            residual = left = torch.zeros(int(sizes.sum()), dtype=torch.float32, device=first.device)
        return _quantize_blocks_on_gpu(format, gradients, sizes, residual, left, levels, share)
    data = np.empty(4 * int(code_words(format.bits, sizes).sum()), np.uint8)
    places = np.array([gradient.data_ptr() for gradient in gradients], np.uint64)
    before, after = (np.empty(0, np.float32) if each is None else each.numpy() for each in (residual, left))
    return data, *cpu.quantize_at(format, places, sizes, before, after, levels, data, share=share)


def _check_blocks(gradients: Sequence[torch.Tensor], device: torch.device) -> None:
    """Raise ValueError unless each tensor is contiguous float32 of one dimension on `device`."""
    for gradient in gradients:
        if gradient.dtype is not torch.float32 or gradient.ndim != 1 or not gradient.is_contiguous():
            got = f"{gradient.dtype} of shape {tuple(gradient.shape)}"
            raise ValueError(f"gradient: expected contiguous torch.float32 of one dimension, got {got}")
        if gradient.device != device:
            raise ValueError(f"gradient: expected a tensor on {device}, got one on {gradient.device}")


def _quantize_blocks_on_gpu(
    format: CodeFormat,
    gradients: Sequence[torch.Tensor],
    sizes: Int64,
    residual: torch.Tensor,
    left: torch.Tensor,
    levels: Float32,
    share: float,
) -> tuple[Bytes, Float64, Int64]:
    words = code_words(format.bits, sizes)
    codes = torch.empty(4 * int(words.sum()), dtype=torch.uint8, device=residual.device)
    if left.data_ptr() != residual.data_ptr():
        left.copy_(residual)
    found = torch.zeros((2, len(gradients)), dtype=torch.float64, device=residual.device)
    parts = torch.split(codes, (4 * words).tolist()), torch.split(left, sizes.tolist())
    tables = levels.reshape(-1, format.level_count)
    for block, (gradient, table, own_codes, own_left) in enumerate(
        zip(gradients, tables, *parts, strict=True)
    ):
        found[0, block], found[1, block] = gradient.abs().sum(dtype=torch.float64), gradient.count_nonzero()
        cuda.quantize(format, gradient, own_left, table, own_codes, share=share)
    # One copy to the host for all blocks' numbers, because each copy waits for the GPU.
    totals, nonzero = found.cpu().numpy()
    return codes.cpu().numpy(), totals, nonzero.astype(np.int64)


def saturate(values: torch.Tensor) -> torch.Tensor:
    """Clip `values` to the finite float32 range, in place, and return them."""
    return values.clamp_(-_LARGEST, _LARGEST)


def add_to(residual: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add `gradient` to `residual` in place, and clip the sum to the finite float32 range.

    Raises FloatingPointError if the gradient is on the host and not finite.
    """
    if on_gpu(residual):
        saturate(residual.add_(gradient))
    else:
        selection.add_to(residual.numpy(), gradient.numpy())


def select(values: torch.Tensor, keep: int, *, center: float = 0.0) -> Selection:
    """Return the `keep` elements with the largest |x - center|; with center 0, no zeros are selected."""
    if not on_gpu(values):
        return selection.select(values.numpy(), keep, center=center)
    return _chosen(values, cuda.select(values, keep, center=center))


def add_and_select(
    gradient: torch.Tensor, residual: torch.Tensor, keep: int, left: torch.Tensor
) -> Selection:
    """Write the saturating sum gradient + residual to `left`, and return its `keep` elements of largest
    magnitude.

    `left` may be `residual` itself. Raises FloatingPointError if the gradient is on the host and not finite.
    """
    if not on_gpu(residual):
        return selection.add_and_select(gradient.numpy(), residual.numpy(), keep, left.numpy())
    if left is not residual:
        left.copy_(residual)
    return _chosen(left, cuda.add_and_select(gradient, left, keep))


def median(values: torch.Tensor) -> float:
    """Return the median; of an even number of elements, the lower of the middle two."""
    if not on_gpu(values):
        return selection.median(values.numpy())
    return float(cuda.median(values))


def put(out: torch.Tensor, indices: Indices, values: Float32) -> None:
    """Assign `values` to the elements of `out` at `indices`, which are ascending and distinct."""
    if on_gpu(out):
        places = torch.from_numpy(indices.astype(np.int64)).to(out.device)
        out[places] = torch.from_numpy(values).to(out.device)
    else:
        selection.put(out.numpy(), indices, values)


def _chosen(values: torch.Tensor, indices: torch.Tensor) -> Selection:
    return Selection(indices.cpu().numpy().view(np.uint32), values[indices.long()].cpu().numpy())
