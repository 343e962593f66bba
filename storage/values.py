"""Convert trees of values to plain data that JSON can hold, and back. Checkpoints, the journal and workers'
own states consist of such data.

    None, bool, int, float, str:       unchanged
    list:                              an array
    dict with str keys:                an object; a key that begins with `$` gets another `$` in front
    bytes:                             {"$bytes": base64}
    tuple, set, frozenset, deque:      {"$tuple": [...]}, ...
    other dict, OrderedDict, Counter:  {"$dict": [[key, value], ...]}, ...
    tensor:                            {"$tensor": name}; its bytes are stored elsewhere
    numpy array:                       {"$array": [name, dtype, shape]}; its bytes are stored elsewhere
    dataclass, NamedTuple, Enum:       {"$": registered name, field: value, ...} (`common.stored`)

Therefore no data can be mistaken for a tag. Nothing is unpickled, and only registered classes are
instantiated.
"""

from __future__ import annotations

import base64
import dataclasses
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache
from types import NoneType
from typing import TYPE_CHECKING, Any

from ..common.stored import class_of, name_of

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]

Plain = Any  # the result of `pack`
_Packer = Callable[[Any, "Tensors | None"], Plain]

_PLAIN = frozenset({str, int, float, bool, NoneType})
_NAME = "$"


class DamagedError(Exception):
    """Data that differ from those written; the message names the file or value, and the damage."""


# ---- writing


def pack(value: Any, tensors: Tensors | None = None) -> Plain:
    """Return a tree of values as plain data that shares nothing with it; `unpack` reverses it.

    Args:
        value: the tree.
        tensors: receives the tensors and arrays of the tree by name; tensors share memory with it. None if
            the tree must not have any.

    Raises:
        TypeError: the tree holds a value that cannot be saved.
    """
    kind = value.__class__
    if kind in _PLAIN:
        return value
    return (_packers.get(kind) or _packer_of(value))(value, tensors)


def pack_fields(value: Any) -> dict[str, Plain]:
    """Return the fields of a dataclass as plain data by name, for `restore`. Its class need not be
    registered."""
    return {name: pack(getattr(value, name)) for name in _saved_fields(value.__class__)}


def _list(value: Any, tensors: Tensors | None) -> Plain:
    """Return an array of the packed items."""
    return [each if each.__class__ in _PLAIN else pack(each, tensors) for each in value]


def _dict(value: Any, tensors: Tensors | None) -> Plain:
    """Return an object with the packed values; if a key is not a str, a `$dict` of pairs instead."""
    for key in value:
        if key.__class__ is not str:
            return _pairs("$dict")(value, tensors)
    return {(f"${key}" if key[:1] == "$" else key): pack(value[key], tensors) for key in value}


def _items(tag: str) -> _Packer:
    """Return a packer that writes a value's items as an array under `tag`."""
    return lambda value, tensors: {tag: _list(value, tensors)}


def _sorted(tag: str) -> _Packer:
    """Return a packer that writes a value's items, sorted, as an array under `tag`."""
    return lambda value, tensors: {tag: _list(sorted(value), tensors)}


def _pairs(tag: str) -> _Packer:
    """Return a packer that writes a mapping as an array of pairs under `tag`."""
    return lambda value, tensors: {tag: [[pack(k, tensors), pack(v, tensors)] for k, v in value.items()]}


_packers: dict[type[Any], _Packer] = {
    list: _list,
    dict: _dict,
    bytes: lambda value, _: {"$bytes": base64.b64encode(value).decode()},
    tuple: _items("$tuple"),
    deque: _items("$deque"),
    set: _sorted("$set"),
    frozenset: _sorted("$frozenset"),
    OrderedDict: _pairs("$ordered"),
    Counter: _pairs("$counter"),
}


def _packer_of(value: Any) -> _Packer:
    """Return the packer for values of this one's class, and cache it in `_packers`; raise TypeError if there
    is none."""
    import numpy as np
    import torch

    kind: Any = value.__class__
    name = name_of(kind)
    packer: _Packer | None = None
    if name is not None:
        packer = _enum(name) if isinstance(value, Enum) else _fields(name, _saved_fields(kind))
    elif isinstance(value, torch.Tensor):
        packer = _tensor
    elif isinstance(value, Enum):
        pass
    elif plain := [each for each in (str, int, float) if issubclass(kind, each)]:  # such as numpy's float64
        packer = _plain(plain[0])
    elif isinstance(value, np.ndarray | np.generic):
        packer = _array
    elif isinstance(value, list):
        packer = _list
    elif isinstance(value, Mapping):
        packer = _dict
    if packer is None:
        raise TypeError(f"{kind.__qualname__} cannot be saved: {value!r:.100}")
    _packers[kind] = packer
    return packer


def _plain(kind: Callable[[Any], Any]) -> _Packer:
    """Return a packer that converts a value of a subclass to `kind`, such as numpy's float64 to float."""
    return lambda value, _: kind(value)


def _enum(name: str) -> _Packer:
    """Return a packer for members of the Enum that is registered under `name`."""
    return lambda value, tensors: {_NAME: name, "value": pack(value.value, tensors)}


def _fields(name: str, fields: tuple[str, ...]) -> _Packer:
    """Return a packer for instances of the class that is registered under `name`, with these fields."""

    def packed(value: Any, tensors: Tensors | None) -> Plain:
        plain: dict[str, Plain] = {_NAME: name}
        for field in fields:
            each = getattr(value, field)
            plain[field] = each if each.__class__ in _PLAIN else pack(each, tensors)
        return plain

    return packed


def _tensor(value: Any, tensors: Tensors | None) -> Plain:
    """Add a tensor to `tensors`, and return a reference to it."""
    return {"$tensor": _add_tensor(value.detach(), tensors)}


def _array(value: Any, tensors: Tensors | None) -> Plain:
    """Add a numpy array's bytes to `tensors`, and return a reference with its dtype and shape."""
    import numpy as np
    import torch

    array = np.array(value)
    name = _add_tensor(torch.from_numpy(array.reshape(-1).view(np.uint8)), tensors)
    return {"$array": [name, array.dtype.str, list(array.shape)]}


def _add_tensor(tensor: torch.Tensor, tensors: Tensors | None) -> str:
    """Add a tensor to `tensors` under a new name, which is returned; raise TypeError if `tensors` is None."""
    if tensors is None:
        raise TypeError("a tensor cannot be saved here")
    name = str(len(tensors))
    tensors[name] = tensor
    return name


@cache
def _saved_fields(kind: Any) -> tuple[str, ...]:
    """Return the names of the fields of a dataclass or NamedTuple that are written."""
    if not dataclasses.is_dataclass(kind):
        return tuple(kind._fields)
    return tuple(each.name for each in dataclasses.fields(kind) if each.metadata.get("saved", True))


# ---- reading


def unpack(plain: Plain, tensors: Mapping[str, torch.Tensor] | None = None) -> Any:
    """Return the tree from the plain data that `pack` returned for it.

    Args:
        plain: the plain data.
        tensors: tensors and arrays by name, as `pack` added them; None if there are none.

    Raises:
        DamagedError: `plain` is not the output of this release's `pack`.
    """
    kind = plain.__class__
    if kind in _PLAIN:
        return plain
    if kind is list:
        return [unpack(each, tensors) for each in plain]
    try:
        tag = next(iter(plain), "")
        if tag[:1] != "$" or tag[:2] == "$$":
            return {_key(key): unpack(each, tensors) for key, each in plain.items()}
        if tag == _NAME:
            return _instance(plain, tensors)
        (inside,) = plain.values()
        if tag == "$tensor":
            return (tensors or {})[inside]
        if tag == "$array":
            name, dtype, shape = inside
            return _array_of((tensors or {})[name], dtype, shape)
        return _READERS[tag](inside, tensors)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedError(f"a saved value cannot be read: {error!r}: {plain!r:.100}") from None


def restore(target: Any, plain: Mapping[str, Plain]) -> None:
    """Set the fields of a dataclass in place from the result of `pack_fields` for an instance of its class.

    Raises:
        DamagedError: a value is not the output of `pack`; some fields may have been set.
        KeyError: a field is missing; some fields may have been set.
    """
    for name in _saved_fields(target.__class__):
        setattr(target, name, unpack(plain[name]))


def _key(key: str) -> str:
    """Return a key of an object as it was before `_dict` escaped it; raise DamagedError if it is a tag."""
    if key[:1] != "$":
        return key
    if key[:2] != "$$":
        raise DamagedError(f"a tag beside other keys: {key!r:.100}")
    return key[1:]


def _array_of(data: torch.Tensor, dtype: str, shape: list[int]) -> Any:
    """Return the numpy array, or the scalar if `shape` is empty, whose bytes `data` holds."""
    import numpy as np

    array = data.numpy().view(np.dtype(dtype)).reshape(shape)
    return array if shape else array[()]


def _made_of_items(make: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a reader that passes the list of unpacked items to `make`."""
    return lambda inside, tensors: make([unpack(each, tensors) for each in inside])


def _made_of_pairs(make: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a reader that passes the dict of unpacked pairs to `make`."""
    return lambda inside, tensors: make({unpack(k, tensors): unpack(v, tensors) for k, v in inside})


_READERS: Mapping[str, Callable[[Any, Any], Any]] = {
    "$bytes": lambda inside, _: base64.b64decode(inside, validate=True),
    "$tuple": _made_of_items(tuple),
    "$deque": _made_of_items(deque),
    "$set": _made_of_items(set),
    "$frozenset": _made_of_items(frozenset),
    "$dict": _made_of_pairs(dict),
    "$ordered": _made_of_pairs(OrderedDict),
    "$counter": _made_of_pairs(Counter),
}


def _instance(plain: dict[str, Plain], tensors: Mapping[str, torch.Tensor] | None) -> Any:
    """Return an instance of a registered class from its fields; raise DamagedError, or an exception of the
    class."""
    name = plain[_NAME]
    kind: Any = class_of(name)
    if kind is None:
        raise DamagedError(f"no class of this release is stored as {name!r:.100}")
    if issubclass(kind, Enum):
        return kind(unpack(plain["value"], tensors))
    names = _saved_fields(kind)
    if len(plain) != len(names) + 1:
        raise DamagedError(f"{name!r}: expected the fields {', '.join(names)}, got {', '.join(plain):.200}")
    if hasattr(kind, "_make"):
        return kind._make([unpack(plain[each], tensors) for each in names])
    # A dataclass: bypass __init__, because every field that it sets is in the file or has a default.
    made: Any = object.__new__(kind)
    for field in _derived_fields(kind):
        make = field.default_factory
        object.__setattr__(made, field.name, field.default if make is dataclasses.MISSING else make())
    for each in names:
        object.__setattr__(made, each, unpack(plain[each], tensors))
    return made


@cache
def _derived_fields(kind: Any) -> tuple[dataclasses.Field[Any], ...]:
    """Return the fields of a dataclass that are not written."""
    return tuple(each for each in dataclasses.fields(kind) if not each.metadata.get("saved", True))
