"""Entries of a model's state_dict besides the trained parameters: buffers, frozen parameters, second names of
tied parameters.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from ...proto.entries import ITEM_BYTES, has_value, of_kind
from ...proto.messages import Entry, EntryKind
from ...proto.state import bytes_of, tensor_of
from .sharing import are_one, pairs_on_one_memory

log = logging.getLogger("gradwire.worker")

Bytes = npt.NDArray[np.uint8]
_COMPILED = "_orig_mod."  # prefix that torch.compile adds to the names in a module


def plain_name(name: str) -> str:
    """Return a parameter's name without the prefix that torch.compile adds."""
    return name.replace(_COMPILED, "")


def least_samples(model: nn.Module) -> int:
    """Return the smallest number of samples that a batch may have: 2 for a model with BatchNorm, else 1."""
    return 2 if any(isinstance(each, _BatchNorm) for each in model.modules()) else 1


class ModelError(ValueError):
    """Raised for a model that Gradwire cannot train. The message names the cause and a remedy.

    Example:
        >>> with gradwire.connect() as job:
        ...     try:
        ...         job.attach(model.double(), optimizer)
        ...     except gradwire.ModelError as error:
        ...         print(error)
        parameter ...
    """


class ModelEntries:
    """The entries of a model's state_dict besides the trained parameters, fixed for the whole training."""

    def __init__(
        self, model: nn.Module, parameters: Iterable[tuple[str, nn.Parameter]], *, frozen_here: bool = False
    ) -> None:
        """Raises ModelError if `model.state_dict()` raises an exception.

        frozen_here: True if frozen parameters stay at the workers, which compare digests of them."""
        self._model = model
        trained = {plain_name(name): parameter for name, parameter in parameters}
        names = {id(parameter): name for name, parameter in trained.items()}
        entries: list[Entry] = []
        left_out: list[str] = []
        current = self._current()
        # An entry on a trained parameter's memory has no value of its own: written back, it would undo steps.
        others = {
            name: value
            for name, value in current.items()
            if name not in trained and isinstance(value, torch.Tensor) and _plain(value)
        }
        aliases, partial = _on_memory_of(trained, others)
        for name, value in current.items():
            tied_to = names.get(id(value), aliases.get(name))
            if name in trained:
                continue
            if tied_to is not None:
                entries.append(Entry(name=name, kind=EntryKind.TIED, tied_to=tied_to))
            elif name not in others or name in partial:
                left_out.append(name)
            else:
                kind = EntryKind.FROZEN if isinstance(value, nn.Parameter) else EntryKind.BUFFER
                stays = frozen_here and kind is EntryKind.FROZEN
                digest = hashlib.sha256(bytes_of(value).data).digest() if stays else b""
                entries.append(
                    Entry(name=name, kind=kind, shape=tuple(value.shape), dtype=_dtype(value), digest=digest)
                )
                names[id(value)] = name
        self.entries = tuple(entries)
        self._known = set(current)
        if left_out:
            log.warning(
                "%s in the model's state_dict: not plain tensors, or parts of trained parameters, so the "
                "server's --output will lack them",
                ", ".join(map(repr, left_out)),
            )

    def warn_of_new(self) -> None:
        """Warn once of buffers that the model has received since the job began: they are not in its state."""
        new = [
            name
            for name, value in self._current().items()
            if name not in self._known and not isinstance(value, nn.Parameter)
        ]
        self._known.update(new)
        if new:
            log.warning(
                "%s: added to the model's state_dict after the job began, as by setting a buffer that was "
                "None: only this worker has it, and the server's --output lacks it; give the buffer its "
                "value before job.attach, or register it with persistent=False",
                ", ".join(map(repr, new)),
            )

    @property
    def least_samples(self) -> int:
        """Smallest number of samples in a batch: 2 for a model with BatchNorm, otherwise 1."""
        return least_samples(self._model)

    @property
    def has_buffers(self) -> bool:
        """True if the model has buffers that belong to the job's state."""
        return any(entry.kind is EntryKind.BUFFER for entry in self.entries)

    @property
    def has_values(self) -> bool:
        """True if there are entries with values on the wire: buffers or frozen parameters."""
        return any(map(has_value, self.entries))

    def values(self, *, frozen: bool) -> dict[str, Bytes]:
        """Return copies of the buffers' bytes, by name: flat uint8. Raises ModelError if an entry is missing,
        or its shape or dtype has changed since the job began."""
        current = self._current()
        found: dict[str, Bytes] = {}
        for entry in of_kind(self.entries, frozen=frozen):
            value = current.get(entry.name)
            self._check(entry, value)
            assert value is not None
            found[entry.name] = bytes_of(value)
        return found

    def put(self, values: Mapping[str, Bytes]) -> None:
        """Overwrite entries of the model, in place. Raises ModelError if an entry is missing, or its shape or
        dtype has changed since the job began.
        """
        current = self._current()
        entries = {entry.name: entry for entry in self.entries}
        with torch.no_grad():
            for name, data in values.items():
                entry, value = entries[name], current.get(name)
                self._check(entry, value)
                assert value is not None
                value.detach().copy_(tensor_of(entry, data))

    def _current(self) -> dict[str, Any]:
        """Return the model's present state_dict, with the model's own tensors; modules may replace buffers.

        Raises ModelError if the model's `state_dict` raises an exception.
        """
        try:
            state = self._model.state_dict(keep_vars=True)
        except Exception as error:
            raise ModelError(f"model.state_dict() raised {type(error).__name__}: {error}") from error
        return {plain_name(name): value for name, value in state.items()}

    @staticmethod
    def _check(entry: Entry, value: Any) -> None:
        """Raise ModelError unless `value` is a tensor of the entry's shape and dtype."""
        if isinstance(value, torch.Tensor) and (tuple(value.shape), _dtype(value)) == (
            entry.shape,
            entry.dtype,
        ):
            return
        got = f"{_dtype(value)} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else "nothing"
        raise ModelError(
            f"{entry.name!r} was {entry.dtype} {entry.shape} when the job began, and is {got} now; register "
            "such a buffer with persistent=False to exclude it from the job's state"
        )


def _plain(value: torch.Tensor) -> bool:
    """Return True if a tensor is dense, has memory, and has a dtype that the wire supports."""
    return value.layout == torch.strided and value.device.type != "meta" and _dtype(value) in ITEM_BYTES


def _on_memory_of(
    trained: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]
) -> tuple[dict[str, str], set[str]]:
    """Return the names of the other tensors that are a trained parameter, each with the parameter's name, and
    of those that share only a part of its memory."""
    names = [*trained, *others]
    tensors = [*trained.values(), *others.values()]
    aliases: dict[str, str] = {}
    partial: set[str] = set()
    for first, second in pairs_on_one_memory(tensors):
        if first < len(trained) <= second:
            if are_one(tensors[first], tensors[second]):
                aliases[names[second]] = names[first]
            else:
                partial.add(names[second])
    return aliases, partial - aliases.keys()


def _dtype(value: torch.Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")
