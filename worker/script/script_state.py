"""State besides the model with which a script continues when it is started again: `job.state`, random
numbers, and the position in its loader."""

from __future__ import annotations

import random
from collections.abc import Generator, Iterable, Iterator, Mapping, MutableMapping
from contextlib import closing, contextmanager
from copy import deepcopy
from itertools import islice
from typing import Any

import numpy as np
import torch

from ...storage.values import pack
from .terms import ScriptError

Tree = Mapping[str, Any]


class State(MutableMapping[str, Any]):
    """`job.state`: by name, values and objects that a script wants to find again.

    A value is None, a number, a text, a tensor, or lists, tuples and dicts of these. An object is anything
    with `state_dict` and `load_state_dict`, or a torch.Generator: it is brought to where its namesake was as
    soon as it is put here. Nothing is written without `state`, and nothing is pickled.
    """

    def __init__(self, restored: Tree) -> None:
        self._restored = dict(restored)  # states of objects that are not here yet, and values
        self._kept: dict[str, Any] = {}

    def __setitem__(self, name: str, value: Any) -> None:
        """Raises ScriptError for what cannot be written down."""
        try:
            pack(_of(value), {})
        except TypeError as error:
            raise ScriptError(
                f"job.state[{name!r}]: {error}; keep plain values, tensors, or what has state_dict() of these"
            ) from None
        if name in self._restored and _is_object(value):
            _load(value, self._restored[name])
        self._kept[name] = value
        self._restored.pop(name, None)

    def __getitem__(self, name: str) -> Any:
        return self._kept[name] if name in self._kept else self._restored[name]

    def __delitem__(self, name: str) -> None:
        found = [each.pop(name) for each in (self._kept, self._restored) if name in each]
        if not found:
            raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter({**self._restored, **self._kept})

    def __len__(self) -> int:
        return len({**self._restored, **self._kept})

    def image(self) -> dict[str, Any]:
        """Return a copy of the present state."""
        found = {**self._restored, **{name: _of(each) for name, each in self._kept.items()}}
        return {name: copied(each) for name, each in found.items()}


def _is_object(value: Any) -> bool:
    return isinstance(value, torch.Generator) or hasattr(value, "load_state_dict")


def _of(value: Any) -> Any:
    """Return the state of a value, which shares memory with it."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    return value.state_dict() if _is_object(value) else value


def copied(value: Any) -> Any:
    """Return a copy of a tree on the host, in which tied tensors are separate, too."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: copied(value[key]) for key in value}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if value.__class__ is list:
        return [copied(each) for each in value]
    if value.__class__ is tuple:
        return tuple(copied(each) for each in value)
    return deepcopy(value)


def _load(value: Any, state: Any) -> None:
    if isinstance(value, torch.Generator):
        value.set_state(state)
    else:
        value.load_state_dict(state)


# ---- random numbers


def random_state() -> dict[str, Any]:
    """Return the state of torch's generators on all devices in use, numpy's and Python's."""
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {
        "torch": torch.get_rng_state(),
        "cuda": devices,
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }


def restore_random_state(state: Tree) -> None:
    """Continue random numbers from a `random_state`."""
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])


# ---- a loader


class Position:
    """How far a script is in the loader of `job.steps`.

    A loader draws its order when it is begun. So a pass of which some batches were taken is begun anew with
    the random numbers that it had begun with, and gives those batches to nobody.
    """

    def __init__(self, restored: Tree | None) -> None:
        """restored: an `image`; None for one at the beginning."""
        self._restored = restored
        self._began: Tree | None = None
        self._taken = 0

    def image(self) -> dict[str, Any] | None:
        """None between two passes."""
        return None if self._began is None else {"began": self._began, "taken": self._taken}

    @contextmanager
    def passing(self, loader: Iterable[Any]) -> Generator[Iterator[Any]]:
        """Iterate over a loader again and again; raises ScriptError once it gives nothing. A restored pass is
        brought to its position at once, which draws random numbers."""
        batches = self._batches(loader, self._rest(loader))
        try:
            with closing(batches):
                yield batches
        finally:
            self._began = None

    def _rest(self, loader: Iterable[Any]) -> Iterator[Any] | None:
        """Return the rest of the restored pass; None if there is none."""
        restored, self._restored = self._restored, None
        if restored is None:
            return None
        _begin_from(loader, restored["began"])
        self._began, self._taken = _beginning(loader), restored["taken"]
        rest = iter(loader)
        for _ in islice(rest, self._taken):
            pass
        return rest

    def _batches(self, loader: Iterable[Any], rest: Iterator[Any] | None) -> Generator[Any]:
        some = True
        while some:
            some = rest is not None  # of which some were taken
            if rest is None:
                self._began, self._taken = _beginning(loader), 0
                rest = iter(loader)
            for batch in rest:
                some = True
                self._taken += 1
                yield batch
            rest = None
        raise ScriptError(
            "job.steps: the loader has no batches, or none any more, and the epoch goes on; give what can be "
            "gone around more than once, such as a DataLoader, and not a generator"
        )


def _generators(loader: Iterable[Any]) -> list[torch.Generator]:
    """Return the generators of a loader and its sampler, each once."""
    any_loader: Any = loader
    found = [getattr(each, "generator", None) for each in (any_loader, getattr(any_loader, "sampler", None))]
    return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())


def _beginning(loader: Iterable[Any]) -> dict[str, Any]:
    return {**random_state(), "generators": [each.get_state() for each in _generators(loader)]}


def _begin_from(loader: Iterable[Any], began: Tree) -> None:
    restore_random_state(began)
    for generator, state in zip(_generators(loader), began["generators"], strict=False):
        generator.set_state(state)
