"""Entries of a model's state_dict besides the trained parameters: buffers, frozen parameters, and second
names of tied ones."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from ...proto.entries import ITEM_BYTES, of_kind
from ...proto.messages import Entry, EntryKind

log = logging.getLogger("gradwire.worker")

Bytes = npt.NDArray[np.uint8]
_COMPILED = "_orig_mod."  # what torch.compile adds to the names in a module


def plain_name(name: str) -> str:
    """Return a name without what torch.compile adds to it."""
    return name.replace(_COMPILED, "")


def least_samples(model: nn.Module) -> int:
    """Samples that a batch of a model must have: BatchNorm takes no statistics from one alone."""
    return 2 if any(isinstance(each, _BatchNorm) for each in model.modules()) else 1


class ModelError(ValueError):
    """A model that Gradwire cannot train; the message says what to change."""


class ModelEntries:
    """The entries of a model, which stay the same for as long as it is trained.

    Attributes:
        entries: in the order of the state_dict.
    """

    def __init__(self, model: nn.Module, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """
        Args:
            parameters: those that are trained, by name.

        Raises:
            ModelError: the model has no state_dict.
        """
        self._model = model
        trained = {plain_name(name): parameter for name, parameter in parameters}
        names = {id(parameter): name for name, parameter in trained.items()}
        entries: list[Entry] = []
        left_out: list[str] = []
        for name, value in self._current().items():
            tied_to = names.get(id(value))
            if name in trained:
                continue
            if tied_to is not None:
                entries.append(Entry(name=name, kind=EntryKind.TIED, tied_to=tied_to))
            elif not isinstance(value, torch.Tensor) or not _plain(value):
                left_out.append(name)
            else:
                kind = EntryKind.FROZEN if isinstance(value, nn.Parameter) else EntryKind.BUFFER
                entries.append(Entry(name=name, kind=kind, shape=tuple(value.shape), dtype=_dtype(value)))
                names[id(value)] = name
        self.entries = tuple(entries)
        if left_out:
            log.warning(
                "%s of the model's state_dict: no plain tensors, so that the server's --output will not have "
                "them",
                ", ".join(map(repr, left_out)),
            )

    @property
    def least_samples(self) -> int:
        """See `least_samples`."""
        return least_samples(self._model)

    @property
    def has_buffers(self) -> bool:
        return any(entry.kind is EntryKind.BUFFER for entry in self.entries)

    @property
    def has_values(self) -> bool:
        """Whether there is anything but other names."""
        return any(entry.kind is not EntryKind.TIED for entry in self.entries)

    def values(self, *, frozen: bool) -> dict[str, Bytes]:
        """Copies of the buffers' bytes, by name. frozen: of the frozen parameters, too.

        Raises:
            ModelError: one has another shape or dtype than it had at first.
        """
        current = self._current()
        found: dict[str, Bytes] = {}
        for entry in of_kind(self.entries, frozen=frozen):
            value = current.get(entry.name)
            self._check(entry, value)
            assert value is not None
            flat = value.detach().cpu().contiguous().reshape(-1).clone()
            found[entry.name] = flat.view(torch.uint8).numpy()
        return found

    def put(self, values: Mapping[str, Bytes]) -> None:
        """Write such bytes to where they belong. Raises ModelError, as `values`."""
        current = self._current()
        entries = {entry.name: entry for entry in self.entries}
        with torch.no_grad():
            for name, data in values.items():
                entry, value = entries[name], current.get(name)
                self._check(entry, value)
                assert value is not None
                # A copy begins where any dtype may.
                flat = torch.from_numpy(data.copy()).view(getattr(torch, entry.dtype))
                value.detach().copy_(flat.view(entry.shape))

    def _current(self) -> dict[str, Any]:
        """The state_dict with the model's own tensors. Modules may put others in the place of buffers."""
        try:
            state = self._model.state_dict(keep_vars=True)
        except Exception as error:
            raise ModelError(f"model.state_dict() raised {type(error).__name__}: {error}") from error
        return {plain_name(name): value for name, value in state.items()}

    @staticmethod
    def _check(entry: Entry, value: Any) -> None:
        if isinstance(value, torch.Tensor) and (tuple(value.shape), _dtype(value)) == (
            entry.shape,
            entry.dtype,
        ):
            return
        got = f"{_dtype(value)} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else "nothing"
        raise ModelError(
            f"{entry.name!r} was {entry.dtype} {entry.shape} when the job began, and is {got} now; register "
            "such a buffer with persistent=False, so that it is no part of the job's state"
        )


def _plain(value: torch.Tensor) -> bool:
    return value.layout == torch.strided and value.device.type != "meta" and _dtype(value) in ITEM_BYTES


def _dtype(value: torch.Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")
