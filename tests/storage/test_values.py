"""Values as plain data: what is unpacked is what was packed, and nothing else is ever made."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.common import stored as registry
from gradwire.common.stored import DERIVED, stored
from gradwire.compressors.four_bit import RunningMagnitude
from gradwire.proto.messages import EntryKind
from gradwire.server.job.events import PushKey
from gradwire.storage.values import DamagedError, pack, pack_fields, restore, unpack

TREE: dict[Any, Any] = {
    "plain": [None, True, -1, 2**63, 0.1, math.inf, "text", b"\x00\xff"],
    PushKey("w", 1, 2): (1, (2, "three")),
    7: {"a state": RunningMagnitude(total=1.5, elements=2.0), "an enum": EntryKind.BUFFER},
    "tensors": [torch.arange(5, dtype=torch.float32), torch.tensor(2.5), torch.empty(0)],
    "arrays": [np.arange(6, dtype=np.uint8).reshape(2, 3), np.array([1e-300])],
}


def same(one: Any, other: Any) -> bool:
    kind = one.__class__
    if kind in (torch.Tensor, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    if kind is dict:
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if kind in (list, tuple):
        return kind is other.__class__ and all(same(*pair) for pair in zip(one, other, strict=True))
    return bool(one == other) and kind is other.__class__


def again(tree: Any) -> Any:
    """The tree after it was text."""
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(pack(tree, tensors)).encode()
    return unpack(json.loads(text), tensors)


@pytest.fixture
def _names() -> Iterator[None]:
    """Names that a test registers are gone after it."""
    tables: Any = registry
    before = dict(tables._classes), dict(tables._names)
    yield
    for table, kept in zip((tables._classes, tables._names), before, strict=True):
        table.clear()
        table.update(kept)


def test_a_tree_comes_back_as_it_was() -> None:
    assert same(again(TREE), TREE)


def test_containers_keep_their_class_and_what_is_like_one_becomes_it() -> None:
    values: tuple[Any, ...] = (
        *({3, 1, 2}, frozenset({"a"}), deque([1, (2,)]), Counter({"a": 2}), {(1, "a"): {}}),
        OrderedDict([("b", 1), ("a", 2)]),
    )
    for value in values:
        found = again(value)
        assert found == value
        assert found.__class__ is value.__class__
    assert again([np.float64(0.5), MappingProxyType({"$": 1})]) == [0.5, {"$": 1}]


TAGS = ("$", "$$", "$bytes", "$tuple", "$dict", "$tensor", "$array", "$nothing", "value", "0", "__metadata__")
NAMES = st.sampled_from(TAGS) | st.text() | st.just("\udcff")
TREES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | NAMES | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(NAMES, inner, max_size=3)
        | st.dictionaries(NAMES | st.tuples(NAMES, st.integers()), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(TREES)
def test_no_name_is_taken_for_structure(tree: Any) -> None:
    assert same(again(tree), tree)
    assert same(again(pack(tree)), pack(tree))


@stored("test-color")
class Color(Enum):
    RED = (1, "red")


@stored("test-pair")
class Pair(NamedTuple):
    one: Any
    other: Any


@stored("test-state")
@dataclass(slots=True)
class State:
    """A dataclass as those of control are."""

    number: int
    inner: Any = None
    index: dict[str, int] = field(default_factory=dict[str, int], metadata=DERIVED)
    most: int = field(default=7, metadata=DERIVED)
    owner: object = field(default=None, metadata=DERIVED)


def test_a_class_is_found_by_its_name_and_derived_fields_begin_anew() -> None:
    tree = Pair(Color.RED, State(1, Pair(1, b"2"), {"a": 1}, most=9, owner=object()))
    assert again(tree) == Pair(Color.RED, State(1, Pair(1, b"2")))
    assert pack(Pair(1, 2)) == {"$": "test-pair", "one": 1, "other": 2}
    target = State(0, index={"a": 1})
    restore(target, pack_fields(State(5, (1,))))
    assert target == State(5, (1,), {"a": 1})


class Unnamed(NamedTuple):
    one: int


class Shade(Enum):
    DARK = 1


@dataclass
class Plain:
    one: int = 1


@pytest.mark.parametrize("value", [Unnamed(1), Shade.DARK, Plain(), object(), torch.Size([1]), State, 1j])
def test_what_has_no_name_cannot_be_saved(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot be saved"):
        pack({"a": [value]}, {})


HOSTILE: tuple[Any, ...] = ("os:system", "os.system", "builtins:eval", "antigravity", "State", 1, [])


WRONG: tuple[Any, ...] = (
    *({"$": name} for name in (*HOSTILE, f"{__name__}:State", f"{__name__}:Plain")),
    {"$": "test-state", "number": 1},
    {"$": "test-state", "number": 1, "inner": 2, "__class__": 3},
    {"$": "test-state", "number": 1, "inner": 2, "most": 3},
    {"$": "test-color", "value": 2},
    {"$": "test-pair", "one": 1, "three": 1},
    {"number": 1, "$": "test-state"},
    {"$tuple": 1},
    {"$tuple": [], "more": 1},
    {"$set": [[1]]},
    {"$dict": [[[1], 1]]},
    {"$dict": [1]},
    {"$counter": 1},
    {"$bytes": "?"},
    {"$nothing": 1},
    {"$tensor": "9"},
    {"$tensor": []},
    {"$array": ["0", "?", [1]]},
    {"$array": ["0", "O", [1]]},
    {"$array": ["0", "<f8", [1]]},
    {"$array": ["0"]},
    1j,  # no value of JSON
)


@pytest.mark.parametrize("wrong", WRONG, ids=repr)
def test_nothing_is_made_but_what_was_packed(wrong: Any) -> None:
    with pytest.raises(DamagedError):
        unpack([wrong], {"0": torch.zeros(2, dtype=torch.uint8)})


@pytest.mark.usefixtures("_names")
def test_a_name_is_one_classs_and_a_class_has_one_name() -> None:
    stored("test-pair")(Pair)  # again: nothing happens
    with pytest.raises(ValueError, match="'test-pair' is taken by Pair"):
        stored("test-pair")(Color)
    with pytest.raises(ValueError, match="already registered as 'test-pair'"):
        stored("test-other")(Pair)
    assert registry.class_of("test-other") is None
    with pytest.raises(TypeError, match="expected a dataclass"):
        stored("test-other")(object)
