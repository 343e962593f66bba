"""Trees of values as plain data that JSON can hold, and back: the text of checkpoints, of the journal and of
workers' own states.

    None, bool, int, float, str      as they are
    list                             an array
    dict with str keys               an object; a key that begins with `$` gets another `$` in front
    bytes                            {"$bytes": base64}
    tuple, set, frozenset, deque     {"$tuple": [...]}, ...
    other dict, OrderedDict, Counter {"$dict": [[key, value], ...]}, ...
    tensor, numpy array              {"$tensor": name}, {"$array": [name, dtype, shape]}: bytes are kept apart
    dataclass, NamedTuple, Enum      {"$": registered name, field: value, ...} (`common.stored`)

So no data can look like a tag. Nothing is unpickled, and no class is made but registered ones.
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

Plain = Any  # what `pack` returns
_Packer = Callable[[Any, "Tensors | None"], Plain]

_PLAIN = frozenset({str, int, float, bool, NoneType})
_NAME = "$"


class DamagedError(Exception):
    """The data differ from what was written; the message names the file or value, and the damage."""


# ---- writing


def pack(value: Any, tensors: Tensors | None = None) -> Plain:
    """Return a tree as plain data that shares nothing with it.

    Args:
        tensors: receives the tensors and arrays by name; tensors share memory with the tree. None for a tree
            that has none.

    Raises:
        TypeError: something in it cannot be saved.
    """
    kind = value.__class__
    if kind in _PLAIN:
        return value
    return (_packers.get(kind) or _packer_of(value))(value, tensors)


def pack_fields(value: Any) -> dict[str, Plain]:
    """Return the fields of a dataclass, for `restore`. Its class needs no name."""
    return {name: pack(getattr(value, name)) for name in _saved(value.__class__)}


def _list(value: Any, tensors: Tensors | None) -> Plain:
    return [each if each.__class__ in _PLAIN else pack(each, tensors) for each in value]


def _dict(value: Any, tensors: Tensors | None) -> Plain:
    for key in value:
        if key.__class__ is not str:
            return _pairs("$dict")(value, tensors)
    return {(f"${key}" if key[:1] == "$" else key): pack(value[key], tensors) for key in value}


def _items(tag: str) -> _Packer:
    return lambda value, tensors: {tag: _list(value, tensors)}


def _sorted(tag: str) -> _Packer:
    return lambda value, tensors: {tag: _list(sorted(value), tensors)}


def _pairs(tag: str) -> _Packer:
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
    """Return how values of this one's class are packed, and remember it for the next. Raises TypeError."""
    import numpy as np
    import torch

    kind: Any = value.__class__
    name = name_of(kind)
    packer: _Packer | None = None
    if name is not None:
        packer = _enum(name) if isinstance(value, Enum) else _fields(name, _saved(kind))
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
    return lambda value, _: kind(value)


def _enum(name: str) -> _Packer:
    return lambda value, tensors: {_NAME: name, "value": pack(value.value, tensors)}


def _fields(name: str, fields: tuple[str, ...]) -> _Packer:
    def packed(value: Any, tensors: Tensors | None) -> Plain:
        plain: dict[str, Plain] = {_NAME: name}
        for field in fields:
            each = getattr(value, field)
            plain[field] = each if each.__class__ in _PLAIN else pack(each, tensors)
        return plain

    return packed


def _tensor(value: Any, tensors: Tensors | None) -> Plain:
    return {"$tensor": _apart(value.detach(), tensors)}


def _array(value: Any, tensors: Tensors | None) -> Plain:
    import numpy as np
    import torch

    array = np.array(value)
    name = _apart(torch.from_numpy(array.reshape(-1).view(np.uint8)), tensors)
    return {"$array": [name, array.dtype.str, list(array.shape)]}


def _apart(tensor: torch.Tensor, tensors: Tensors | None) -> str:
    if tensors is None:
        raise TypeError("a tensor cannot be saved here")
    name = str(len(tensors))
    tensors[name] = tensor
    return name


@cache
def _saved(kind: Any) -> tuple[str, ...]:
    """Return the names of the fields that are written."""
    if not dataclasses.is_dataclass(kind):
        return tuple(kind._fields)
    return tuple(each.name for each in dataclasses.fields(kind) if each.metadata.get("saved", True))


# ---- reading


def unpack(plain: Plain, tensors: Mapping[str, torch.Tensor] | None = None) -> Any:
    """Return the tree that `pack` was given.

    Raises:
        DamagedError: `pack` has not made this, or another release has.
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
            return _made(plain, tensors)
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
    """Set the fields of a dataclass to those that `pack_fields` returned for one of its class.

    Raises:
        DamagedError, KeyError: it has not; some of the fields may have been set.
    """
    for name in _saved(target.__class__):
        setattr(target, name, unpack(plain[name]))


def _key(key: str) -> str:
    if key[:1] != "$":
        return key
    if key[:2] != "$$":
        raise DamagedError(f"a tag beside other keys: {key!r:.100}")
    return key[1:]


def _array_of(data: torch.Tensor, dtype: str, shape: list[int]) -> Any:
    import numpy as np

    array = data.numpy().view(np.dtype(dtype)).reshape(shape)
    return array if shape else array[()]


def _made_of_items(make: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda inside, tensors: make([unpack(each, tensors) for each in inside])


def _made_of_pairs(make: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
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


def _made(plain: dict[str, Plain], tensors: Mapping[str, torch.Tensor] | None) -> Any:
    """Return an instance of a registered class. Raises DamagedError, and what the class raises."""
    name = plain[_NAME]
    kind: Any = class_of(name)
    if kind is None:
        raise DamagedError(f"this release has no stored class named {name!r:.100}")
    if issubclass(kind, Enum):
        return kind(unpack(plain["value"], tensors))
    names = _saved(kind)
    if len(plain) != len(names) + 1:
        raise DamagedError(f"{name!r}: expected the fields {', '.join(names)}, got {', '.join(plain):.200}")
    if hasattr(kind, "_make"):
        return kind._make([unpack(plain[each], tensors) for each in names])
    made: Any = object.__new__(kind)
    for field in _derived(kind):
        make = field.default_factory
        object.__setattr__(made, field.name, field.default if make is dataclasses.MISSING else make())
    for each in names:
        object.__setattr__(made, each, unpack(plain[each], tensors))
    return made


@cache
def _derived(kind: Any) -> tuple[dataclasses.Field[Any], ...]:
    """Return the fields of a dataclass that are not written."""
    return tuple(each for each in dataclasses.fields(kind) if not each.metadata.get("saved", True))
