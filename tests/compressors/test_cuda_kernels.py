"""The Triton kernels against the plain ones, bit for bit: on a GPU, or else in Triton's interpreter."""

from __future__ import annotations

import os
from itertools import product

import numpy as np
import numpy.typing as npt
import plain_codes
import plain_selection
import pytest
import torch

from gradwire.compressors import CodeFormat

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

from gradwire.compressors.kernels import cuda

Array = npt.NDArray[np.float32]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LEVELS = {
    CodeFormat.SIGNED_4BIT: np.array([0.04, 0.07, 0.1, 0.2, 0.25, 0.4, 0.6], np.float32),
    CodeFormat.SIGNED_2BIT: np.array([0.1], np.float32),
}
# Around a word, a block of either kernel, and what one program takes of a histogram.
SIZES = [1, 7, 8, 9, 1023, 1025, 2049, cuda.SELECT_BLOCK * cuda.BLOCKS_PER_PROGRAM + 1]
# Selection alone knows neither words nor the smaller block, and the interpreter takes seconds for each size.
SELECTED = [1, 9, cuda.SELECT_BLOCK + 1, cuda.SELECT_BLOCK * cuda.BLOCKS_PER_PROGRAM + 1]


def values(elements: int, seed: int = 0) -> Array:
    """All magnitudes from denormal to huge, both zeros, and values on the very thresholds."""
    rng = np.random.default_rng([elements, seed])
    scales = rng.choice(np.array([1e-44, 1e-30, 1e-3, 0.1, 1.0, 1e30]), elements)
    found: Array = (rng.standard_normal(elements) * scales).astype(np.float32)
    special = np.array([0.0, -0.0, 0.1, -0.1, 0.25, 3.4e38, -3.4e38], np.float32)
    found[rng.integers(0, elements, min(elements, 20))] = rng.choice(special, min(elements, 20))
    return found


def on_device(array: Array) -> torch.Tensor:
    return torch.from_numpy(array.copy()).to(DEVICE)


@pytest.mark.parametrize("format", LEVELS)
@pytest.mark.parametrize("elements", [0, *SIZES])
def test_quantize(elements: int, format: CodeFormat) -> None:
    gradient = values(elements) if elements else np.empty(0, np.float32)
    residual = values(elements, 1) if elements else np.empty(0, np.float32)
    levels, size = LEVELS[format], format.code_bytes(elements)
    ours, data = on_device(residual), torch.zeros(size, dtype=torch.uint8, device=DEVICE)
    cuda.quantize(format, on_device(gradient), ours, levels, data)
    expected = np.empty(size, np.uint8)
    plain_codes.quantize(format, gradient, residual, levels, expected)
    assert np.array_equal(data.cpu().numpy(), expected)
    assert np.array_equal(ours.cpu().numpy().view(np.uint32), residual.view(np.uint32))


@pytest.mark.parametrize("elements", SELECTED)
def test_select(elements: int) -> None:
    layouts = {
        "mixed": values(elements),
        "constant": np.full(elements, 0.5, np.float32),
        "zero": np.zeros(elements, np.float32),
        "ties": np.round(np.random.default_rng(0).standard_normal(elements)).astype(np.float32),
    }
    for name, array in layouts.items():
        # The interpreter takes long: all numbers to keep of the first layout, and one of each other.
        for keep, center in product(
            {0, 1, elements // 10, elements} if name == "mixed" else {elements // 10}, (0.0, 0.25)
        ):
            expected = plain_selection.select(array, keep, center=center)
            indices = cuda.select(on_device(array), keep, center=center)
            assert np.array_equal(indices.cpu().numpy(), expected.indices), (name, keep, center)


@pytest.mark.parametrize("elements", SIZES)
def test_add_and_select(elements: int) -> None:
    gradient, residual = values(elements), values(elements, 1)
    ours = on_device(residual)
    indices = cuda.add_and_select(on_device(gradient), ours, elements // 3)
    expected = plain_selection.add_and_select(gradient, residual, elements // 3)
    assert np.array_equal(ours.cpu().numpy().view(np.uint32), residual.view(np.uint32))
    assert np.array_equal(indices.cpu().numpy(), expected.indices)


@pytest.mark.parametrize("elements", SELECTED)
def test_median(elements: int) -> None:
    for array in (values(elements), -np.abs(values(elements)), np.zeros(elements, np.float32)):
        assert cuda.median(on_device(array)) == plain_selection.median(array)


def test_what_a_kernel_could_not_take_is_refused() -> None:
    with pytest.raises(ValueError, match=r"values: expected contiguous torch.float32 of shape \(4,\)"):
        cuda.select(torch.zeros(8, device=DEVICE)[::2], 1)
    with pytest.raises(ValueError, match="keep: expected 0 to 4, got 5"):
        cuda.select(torch.zeros(4, device=DEVICE), 5)
    zeros = torch.zeros(8, device=DEVICE)
    data = torch.zeros(4, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(ValueError, match="expected signed codes"):
        cuda.quantize(CodeFormat.BINARY, zeros, zeros, np.zeros(2, np.float32), data)
