"""Checks of the arrays that machine code receives. It trusts the sizes and addresses that it is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..payload import Bytes, CodeFormat, Float32


def check(
    name: str, array: npt.NDArray[np.generic], dtype: type[np.generic], size: int, *, written: bool = False
) -> None:
    """Raise ValueError unless `array` holds `size` consecutive, aligned elements of `dtype`.

    The checks are not assertions: under `python -O` machine code could read memory outside the array.
    written: True if machine code writes to the array, which must then be writeable.
    """
    flags = array.flags
    if array.dtype != dtype or array.shape != (size,) or not flags.c_contiguous or not flags.aligned:
        layout = "contiguous" if flags.c_contiguous else "strided"
        expected = f"contiguous {np.dtype(dtype)} of shape ({size},)"
        raise ValueError(f"{name}: expected {expected}, got {layout} {array.dtype} of shape {array.shape}")
    if written and not flags.writeable:
        raise ValueError(f"{name}: expected a writeable array, got a read-only one")


def checked_pair(gradient: Float32, residual: Float32 | None) -> Float32:
    """Check a gradient and its residual; return the residual as the loops take it, an empty array for
    None."""
    check("gradient", gradient, np.float32, gradient.size)
    if residual is None:
        return np.empty(0, np.float32)
    check("residual", residual, np.float32, gradient.size, written=True)
    return residual


def address(array: npt.NDArray[np.generic]) -> np.uint64:
    return np.uint64(array.__array_interface__["data"][0])


def addresses(arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.uint64]:
    return np.array([array.__array_interface__["data"][0] for array in arrays], np.uint64)


def code_addresses(datas: Sequence[Bytes], size: int) -> npt.NDArray[np.uint64]:
    """Check that each array in `datas` is `size` bytes long, and return the address of each."""
    for data in datas:
        check("data", data, np.uint8, size)
    return addresses(datas)


def check_keep(keep: int, elements: int) -> None:
    if not 0 <= keep <= elements:
        raise ValueError(f"keep: expected 0 to {elements}, got {keep}")


def check_signed(format: CodeFormat) -> None:
    """Raise ValueError unless `format` is SIGNED_4BIT or SIGNED_2BIT."""
    if format not in (CodeFormat.SIGNED_4BIT, CodeFormat.SIGNED_2BIT):
        raise ValueError(f"format: expected signed codes of 4 or 2 bits, got {format.value}")


def in_order(sums: npt.NDArray[np.float64]) -> float:
    """Return the sum of `sums`, added one after the other from the first on.

    The built-in `sum` compensates for rounding from Python 3.12 on, so its bits would differ.
    """
    total = 0.0
    for block_sum in sums.tolist():
        total += block_sum
    return total
