"""Checksums of training samples, by which the server finds out whether workers have the same data set, and
whether they train on the same batches."""

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
HEAD = 4096  # values of each tensor that count in `batch_checksum`
DIGITS = 4  # of sums over floating-point data, whose last bits may differ between computers


def data_checksum(batch: Callable[[Indices], Any], samples: int) -> int:
    """Return a CRC-32C over the contents of a few samples, spread over the data set.

    Integers, text and shapes count exactly; floating-point values count by a few sums, to four digits. The
    generators of torch, numpy and `random` are restored afterwards. Returns the checksum, never 0; or 0 if
    drawing the samples twice gives different contents, as with random augmentation, so that checksums cannot
    be compared. batch: returns the samples with the given indices, as any nest of tensors, arrays and
    numbers.
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


def batch_checksum(batch: Any) -> int:
    """Return a CRC-32C over a batch, of each tensor over its first values; never 0.

    It tells whether two workers have the same batch. Objects that are no nest of tensors, arrays and numbers
    count by their type alone. A bare number may count batches that the script draws itself, so the states of
    the generators count with it.
    """
    return _checksum((batch, *_generators()) if isinstance(batch, int) else _heads(batch), 0) or 1


def _heads(value: Any) -> Any:
    """Return a nest with the first values of each tensor and array alone."""
    if isinstance(value, torch.Tensor):
        return value.reshape(-1)[:HEAD] if _plain(value) else str(value.layout)
    if issubclass(type(value), np.ndarray):
        return value.reshape(-1)[:HEAD]
    members = members_of(value)
    return {key: _heads(member) for key, member in members.items()} if members else value


def _plain(tensor: torch.Tensor) -> bool:
    """Return True for a tensor that has its values one after the other, or with strides."""
    return tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized)


def _generators() -> tuple[torch.Tensor, Any, Any]:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


@contextmanager
def _generators_kept() -> Generator[None]:
    states = _generators()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


def _checksum(value: Any, before: int) -> int:
    """Return the CRC-32C of a nest's contents, continued from the checksum `before`."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().to_dense()
        value = (value.double() if value.is_floating_point() else value).resolve_conj().numpy()
    if isinstance(value, np.ndarray | np.generic | float | int | bool):
        return _extended(before, _contents(np.asarray(value)))
    if isinstance(value, str | bytes):
        return _extended(before, value.encode() if isinstance(value, str) else value)
    checksum = _extended(before, type(value).__name__.encode())
    for key, member in members_of(value).items():
        checksum = _checksum(member, _extended(checksum, str(key).encode()))
    return checksum


def _contents(values: np.ndarray[Any, Any]) -> bytes:
    """Return an array's kind and shape as bytes, with its values or, for floats, rounded sums of them."""
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
