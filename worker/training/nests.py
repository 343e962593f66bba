"""Nested batches, as users build them: tuples, lists, mappings and dataclasses of tensors."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a nested batch with every tensor moved to a device; the given batch stays unchanged.

    Tuples, lists, mappings and dataclasses keep their types. An object with a method `to`, such as a
    `PackedSequence`, moves itself. A batch without tensors is returned as the same object.
    """
    move: Any = getattr(batch, "to", None)
    if callable(move):
        return move(device)
    members = members_of(batch)
    moved = {key: to_device(value, device) for key, value in members.items()}
    if all(moved[key] is value for key, value in members.items()):
        return batch
    return _with_members(batch, moved)


def members_of(nest: Any) -> dict[Any, Any]:
    """Return the members of a tuple or list by index, of a mapping by key, of a dataclass by field.

    Any other object has no members: the result is empty.
    """
    found: Any = {}
    if isinstance(nest, Mapping):
        found = nest  # pyright: ignore[reportUnknownVariableType]
    elif isinstance(nest, list | tuple):
        found = enumerate(nest)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    elif dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        names = [field.name for field in dataclasses.fields(nest)]
        found = {name: getattr(nest, name) for name in names if hasattr(nest, name)}
    return dict(found)


def _with_members(nest: Any, members: dict[Any, Any]) -> Any:
    """Return a nest of the same type with other members; a read-only mapping becomes a dict."""
    make: Any = getattr(nest, "_make", nest.__class__)  # `_make` builds a namedtuple
    if isinstance(nest, tuple):
        return make(list(members.values()))
    has_items = isinstance(nest, MutableMapping | list)
    if isinstance(nest, Mapping) and not has_items:
        return members
    other: Any = copy.copy(nest)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    for key, value in members.items():
        if has_items:
            other[key] = value
        else:
            object.__setattr__(other, key, value)  # works for a frozen dataclass too
    return other
