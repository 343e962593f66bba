# mypy: ignore-errors
# pyright: basic, reportGeneralTypeIssues=false, reportAssignmentType=false
# pyright: reportOperatorIssue=false, reportArgumentType=false
"""Triton kernels behind `cuda`: quantization with error feedback, and the passes of an exact selection.

They produce the same bits as the CPU: sums and differences are rounded after each operation and denormals are
kept. No multiplication could be fused with an addition.
"""

from __future__ import annotations

import triton
import triton.language as tl

# A Triton constant, because a kernel may not refer to a plain Python global.
LARGEST = tl.constexpr(3.4028234663852886e38)
BINS = 2048


@triton.jit
def quantize(gradient, residual, levels, begins, words, elements, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Quantize gradient + residual, as `cpu.quantize` says; leave the error in `residual`.

    Args:
        levels: float32 pointer to the levels.
        begins: float32 pointer to the thresholds: magnitude above which each level is sent.
        words: int32 pointer that receives the packed codes.
    """
    PER_WORD: tl.constexpr = 32 // BITS
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < elements
    total = tl.load(gradient + at, mask=inside, other=0.0) + tl.load(residual + at, mask=inside, other=0.0)
    total = tl.minimum(tl.maximum(total, -LARGEST), LARGEST)
    size = tl.abs(total)
    if BITS == 4:
        index = tl.zeros((BLOCK,), tl.int32)
        value = tl.zeros((BLOCK,), tl.float32)
        for k in tl.static_range(7):
            level = tl.load(levels + k)
            beyond = size > tl.load(begins + k)
            index += beyond.to(tl.int32)
            value = tl.where(beyond, level, value)
        code = tl.where((total > 0) & (index > 0), index + 8, index)
        rest = size - value
        # Times -1, not minus: before 3.8 Triton computes -x as 0 - x, so that -0 would become +0.
        rest = tl.where(total.to(tl.int32, bitcast=True) < 0, rest * -1.0, rest)
    else:
        level = tl.load(levels)
        beyond = size >= level
        value = tl.where(beyond, level, 0.0)
        code = tl.where(beyond, tl.where(total > 0, 3, 2), 0)
        rest = total - tl.where(total < 0, -value, value)
    code = tl.where(inside, code, 0)
    tl.store(residual + at, rest, mask=inside)
    shifts = tl.arange(0, PER_WORD) * BITS
    packed = tl.sum(tl.reshape(code, (BLOCK // PER_WORD, PER_WORD)) << shifts[None, :], axis=1)
    place = tl.program_id(0) * (BLOCK // PER_WORD) + tl.arange(0, BLOCK // PER_WORD)
    tl.store(words + place, packed, mask=place < (elements + PER_WORD - 1) // PER_WORD)


@triton.jit
def add(gradient, residual, elements, BLOCK: tl.constexpr):
    """Add `gradient` to `residual` in place, and clip the sum to the finite float32 range."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < elements
    total = tl.load(gradient + at, mask=inside, other=0.0) + tl.load(residual + at, mask=inside, other=0.0)
    tl.store(residual + at, tl.minimum(tl.maximum(total, -LARGEST), LARGEST), mask=inside)


@triton.jit
def _keys(values, at, inside, center, ORDERED: tl.constexpr):
    """Return unsigned numbers, as int64, that are ordered as the scores are.

    Args:
        ORDERED: True for the score x; False for |x - center|.
    """
    value = tl.load(values + at, mask=inside, other=0.0)
    if ORDERED:
        bits = (value + 0.0).to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF  # adding 0 turns -0 into +0
        return tl.where(bits >= 0x80000000, 0xFFFFFFFF - bits, bits + 0x80000000)
    return tl.abs(value - center).to(tl.int32, bitcast=True).to(tl.int64)


@triton.jit
def histogram(
    values,
    elements,
    center,
    counts,
    prefix,
    SHIFT: tl.constexpr,
    WIDTH: tl.constexpr,
    ORDERED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Count the keys by one digit, among those whose higher bits are `prefix`.

    Args:
        counts: int32 pointer; the counts are added there, in ascending order of the digit.
        SHIFT, WIDTH: position of the digit's lowest bit, and its width in bits.
        ORDERED: True for the score x; False for |x - center|.
        BLOCKS: number of blocks that one program reads.
    """
    bins: tl.constexpr = 2048
    found = tl.zeros((2 * bins,), tl.int32)
    for block in range(BLOCKS):
        at = (tl.program_id(0) * BLOCKS + block) * BLOCK + tl.arange(0, BLOCK)
        inside = at < elements
        key = _keys(values, at, inside, center, ORDERED)
        chosen = inside & ((key >> (SHIFT + WIDTH)) == prefix)
        part = (key >> SHIFT) & ((1 << WIDTH) - 1)
        found += tl.histogram(tl.where(chosen, part, bins).to(tl.int32), 2 * bins)
    place = tl.arange(0, 2 * bins)
    tl.atomic_add(counts + place, found, mask=(place < bins) & (found > 0))


@triton.jit
def count(values, elements, center, threshold, above, equal, BLOCK: tl.constexpr):
    """Count in each block the keys above the threshold and the keys that equal it, for the score |x -
    center|.

    Args:
        above, equal: int32 pointers that receive both counts of each block.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < elements
    key = _keys(values, at, inside, center, False)
    tl.store(above + tl.program_id(0), tl.sum((inside & (key > threshold)).to(tl.int32)))
    tl.store(equal + tl.program_id(0), tl.sum((inside & (key == threshold)).to(tl.int32)))


@triton.jit
def write(values, elements, center, threshold, above, equal, ties, indices, BLOCK: tl.constexpr):
    """Write the indices of the keys above the threshold, and of the first `ties` keys that equal it, in
    ascending order.

    Args:
        above, equal: number of such keys in all blocks before each block.
        indices: int32 pointer that receives the indices.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < elements
    key = _keys(values, at, inside, center, False)
    higher = (inside & (key > threshold)).to(tl.int32)
    same = (inside & (key == threshold)).to(tl.int32)
    highers_before = tl.load(above + tl.program_id(0)) + tl.cumsum(higher, axis=0) - higher
    ties_before = tl.load(equal + tl.program_id(0)) + tl.cumsum(same, axis=0) - same
    chosen = (higher > 0) | ((same > 0) & (ties_before < ties))
    tl.store(indices + highers_before + tl.minimum(ties_before, ties), at, mask=chosen)
