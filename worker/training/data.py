"""Whether workers train on the same data: a checksum of a few samples, which each takes by itself."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import google_crc32c
import numpy as np
import torch

from .nests import members_of
from .sharding import Indices

SAMPLES = 4  # spread over the data set
DIGITS = 4  # of sums over floating-point data, whose last bits may differ between computers


def data_checksum(batch: Callable[[Indices], Any], samples: int) -> int:
    """CRC-32C over what a few samples hold.

    Integers, text and shapes count exactly; of floating-point values a few sums do, to four digits. The
    generators of torch, numpy and `random` are left as they were.

    Args:
        batch: the samples with these indices, in any nest of tensors, arrays and numbers.
        samples: how many there are.

    Returns:
        0 where samples are not the same when they are drawn again, as with random augmentation: these cannot
        be compared.
    """
    indices = np.unique(np.linspace(0, samples - 1, SAMPLES).astype(np.int64))
    with _generators_kept():
        found: list[int] = []
        for seed in range(2):
            torch.manual_seed(seed)
            np.random.seed(seed)
            random.seed(seed)
            found.append(_checksum(batch(indices), 0))
    return (found[0] or 1) if found[0] == found[1] else 0


@contextmanager
def _generators_kept() -> Generator[None]:
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


def _checksum(value: Any, before: int) -> int:
    """Return the CRC-32C of a nest, continued from `before`."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().to_dense()
        value = (value.double() if value.is_floating_point() else value).resolve_conj().numpy()
    if isinstance(value, np.ndarray | np.generic | float | int | bool):
        return _extended(before, _described(np.asarray(value)))
    if isinstance(value, str | bytes):
        return _extended(before, value.encode() if isinstance(value, str) else value)
    checksum = _extended(before, type(value).__name__.encode())
    for key, member in members_of(value).items():
        checksum = _checksum(member, _extended(checksum, str(key).encode()))
    return checksum


def _described(values: np.ndarray[Any, Any]) -> bytes:
    """Shape and contents."""
    head = f"{values.dtype.kind}{values.shape}".encode()
    if values.dtype.kind == "O":
        return head
    if values.dtype.kind != "f":
        return head + np.ascontiguousarray(values).tobytes()
    flat = values.astype(np.float64).ravel()
    scale = float(np.abs(flat).sum())
    if not scale or not np.isfinite(scale):
        return head + f" {scale}".encode()
    sums = (flat.sum() / scale, flat @ np.cos(np.arange(flat.size)) / scale, flat @ flat / scale**2)
    return head + " ".join([f"{scale:.{DIGITS}g}", *(f"{each:.{DIGITS}f}" for each in sums)]).encode()


def _extended(checksum: int, data: bytes) -> int:
    return int(google_crc32c.extend(checksum, data))  # pyright: ignore[reportUnknownArgumentType]
