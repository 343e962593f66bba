"""State besides the model with which a restarted script continues: `job.state`, random state, position in its
loader."""

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
    """The mapping `job.state`: values and objects by name that are saved with this worker's state and
    restored from it.

    A value is None, a number, a text, a tensor, or lists, tuples and dicts of these. An object has
    `state_dict` and `load_state_dict`, or is a torch.Generator; setting it under a name restores the saved
    state of that name in it. Nothing is saved without the option `state`, and nothing is pickled.
    """

    def __init__(self, restored: Tree) -> None:
        self._restored = dict(restored)  # restored values and states that the script has not set yet
        self._kept: dict[str, Any] = {}

    def __setitem__(self, name: str, value: Any) -> None:
        """Set a value or object, after restoring its saved state; raise ScriptError if it cannot be saved."""
        try:
            pack(_state_of(value), {})
        except TypeError as error:
            raise ScriptError(
                f"job.state[{name!r}]: {error}; use plain values, tensors, or objects whose state_dict() has "
                "only these"
            ) from None
        if name in self._restored and _is_object(value):
            _load(value, self._restored[name])
        self._kept[name] = value
        self._restored.pop(name, None)

    def __getitem__(self, name: str) -> Any:
        """Return the value that the script has set, else the restored one."""
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
        """Return a copy of the present values and states by name, for saving."""
        found = {**self._restored, **{name: _state_of(each) for name, each in self._kept.items()}}
        return {name: copied(each) for name, each in found.items()}


def _is_object(value: Any) -> bool:
    """Return True if a value has a state that can be loaded in place."""
    return isinstance(value, torch.Generator) or hasattr(value, "load_state_dict")


def _state_of(value: Any) -> Any:
    """Return the state of an object, or the value itself; it shares memory."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    return value.state_dict() if _is_object(value) else value


def copied(value: Any) -> Any:
    """Return a copy of a tree with all tensors on the host; tied tensors become separate ones."""
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
    """Return the state of numpy's, Python's and torch's generators, those of CUDA devices in use included."""
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {
        "torch": torch.get_rng_state(),
        "cuda": devices,
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }


def restore_random_state(state: Tree) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])


# ---- a loader


class Position:
    """The position of a script in the loader of `job.steps`, saved and restored with the worker's state.

    A loader draws its order when its iteration begins. A pass is therefore restored by iterating anew with
    the random state of its beginning, and dropping the batches that were taken before.
    """

    def __init__(self, restored: Tree | None) -> None:
        self._restored = restored
        self._began: Tree | None = None
        self._taken = 0

    def image(self) -> dict[str, Any] | None:
        """Return the position for saving: random state at the pass's beginning and number of batches taken;
        None between passes."""
        return None if self._began is None else {"began": self._began, "taken": self._taken}

    @contextmanager
    def iterate(self, loader: Iterable[Any]) -> Generator[Iterator[Any]]:
        """Yield an iterator that passes over the loader again and again; it raises ScriptError if a pass
        yields no batch.

        A restored pass is advanced to its position at once, which draws random numbers.
        """
        batches = self._batches(loader, self._rest(loader))
        try:
            with closing(batches):
                yield batches
        finally:
            self._began = None

    def _rest(self, loader: Iterable[Any]) -> Iterator[Any] | None:
        """Return the iterator over the rest of the restored pass; None if there is none."""
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
        """Yield the batches of the restored pass and then of one new pass after the other."""
        some = True
        while some:
            some = rest is not None  # a restored pass may be exhausted, because batches were taken before
            if rest is None:
                self._began, self._taken = _beginning(loader), 0
                rest = iter(loader)
            for batch in rest:
                some = True
                self._taken += 1
                yield batch
            rest = None
        raise ScriptError(
            "job.steps: the loader has no batches, or has run out of them before the epoch is over; pass an "
            "iterable that can be iterated more than once, such as a DataLoader, not a generator"
        )


def _generators(loader: Iterable[Any]) -> list[torch.Generator]:
    any_loader: Any = loader
    found = [getattr(each, "generator", None) for each in (any_loader, getattr(any_loader, "sampler", None))]
    return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())


def _beginning(loader: Iterable[Any]) -> dict[str, Any]:
    """Return the random state at the beginning of a pass, with that of the loader's generators."""
    return {**random_state(), "generators": [each.get_state() for each in _generators(loader)]}


def _begin_from(loader: Iterable[Any], began: Tree) -> None:
    restore_random_state(began)
    for generator, state in zip(_generators(loader), began["generators"], strict=False):
        generator.set_state(state)
