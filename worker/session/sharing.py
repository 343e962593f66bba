"""Memory that a model's parameters share: with each other, with its buffers, with tensors outside of it.

Training writes to the memory of a parameter, so every tensor on the same memory changes with it: a numpy
view, the model of another process after `share_memory()`, a buffer made from `weight.data`. A job trains the
same model:

| the memory of a trained parameter | the worker |
|---|---|
| nothing else is known to use it | moves the parameter into the replica's buffer |
| something else uses it, or may do so | leaves the parameter there, and copies each update to it |
| another trained parameter uses it, in whole or in part | `ModelError` that names both |

Two trained parameters are refused because an optimizer would step the same memory twice, with a gradient and
moments of each; the server holds them as two tensors.

Tensors outside of the model cannot be listed. But a storage counts the tensors that use it, and says whether
it lies in memory that other processes see. One that torch has not allocated, as after `from_numpy`, cannot be
resized. So a parameter whose memory is only suspected costs a copy, and no refusal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch


def pairs_on_one_memory(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int, int]]:
    """Yield the indices of every two tensors that have an element in common."""
    in_order = sorted(range(len(tensors)), key=lambda index: _range(tensors[index]))
    near: list[int] = []  # tensors before this one that may reach into its range
    for index in in_order:
        start, end = _range(tensors[index])
        if start == end:
            continue
        near = [other for other in near if _range(tensors[other])[1] > start]
        for other in near:
            if _have_common_element(tensors[other], tensors[index]):
                yield min(other, index), max(other, index)
        near.append(index)


def are_one(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two tensors have the same elements of memory, in the same order and dtype."""
    if not one.numel() or one.data_ptr() != other.data_ptr():
        return False
    return (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())


def repeats_elements(tensor: torch.Tensor) -> bool:
    """Return True if elements of one tensor share memory, as after `expand`."""
    return tensor.numel() > _span(tensor)


def used_elsewhere(parameters: Sequence[torch.Tensor]) -> list[bool]:
    """Return, for each parameter, whether something besides these parameters uses its memory, or may do so.
    parameters: strided tensors, each once."""
    # Old CPU builds of torch do not say how many tensors use a storage.
    any_torch: Any = torch
    users: Callable[[int], int] | None = getattr(any_torch._C, "_storage_Use_Count", None)
    alone = torch.empty(1, dtype=torch.uint8, device="cpu")
    storage: Any = alone.untyped_storage()  # is itself a user
    expected = 0 if users is None else users(storage._cdata)
    storages: list[Any] = [parameter.untyped_storage() for parameter in parameters]
    own = Counter[int](each._cdata for each in storages)
    del storages  # each is a user

    def used(parameter: torch.Tensor) -> bool:
        storage: Any = parameter.untyped_storage()
        if not parameter.numel():
            return False
        if users is None or users(storage._cdata) > expected + own[storage._cdata] - 1:
            return True
        # On a GPU every storage says that it is shared.
        return not storage.resizable() or bool(storage.device.type == "cpu" and storage.is_shared())

    return list(map(used, parameters))


def _span(tensor: torch.Tensor) -> int:
    if not tensor.numel():
        return 0
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in pairs)


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte and of the byte after its last one."""
    start = tensor.data_ptr()
    return start, start + _span(tensor) * tensor.element_size()


def _have_common_element(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two tensors whose ranges overlap share an element; columns of one matrix do not."""
    if all(tensor.numel() == _span(tensor) for tensor in (one, other)):
        return True
    return not set(_addresses(one)).isdisjoint(_addresses(other))


def _addresses(tensor: torch.Tensor) -> list[int]:
    span = torch.arange(_span(tensor), dtype=torch.int64, device="cpu")
    places = span.as_strided(tensor.shape, tensor.stride())
    addresses: Any = places.reshape(-1) * tensor.element_size() + tensor.data_ptr()
    return list(addresses.tolist())
