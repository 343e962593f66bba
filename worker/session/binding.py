"""Binds the model's parameters to the replica's memory, and checks that they stay there.

The replica has one buffer, and each parameter of the model is a view of its range: an update that is written
to the buffer changes the model at once. A parameter whose memory others use stays there (`sharing`), and the
replica copies updates to it. The user's code can break that between two steps:

| the user's code | the worker |
|---|---|
| points `parameter.data` elsewhere, as `model.half().float()` does | points it back to the buffer; warns |
| changes the dtype, shape or device of a parameter | `ModelError` that names parameter and change |
| removes a parameter: `load_state_dict(assign=True)`, another module, tied weights | `ModelError` |
| adds a parameter that requires a gradient, or unfreezes one that the replica lacks | `ModelError` |
| adds a frozen parameter, or renames one, as `torch.nn.utils.prune` does | a warning |
| writes to a parameter in place | a warning; the drift check replaces the values later |
| writes in place to `parameter.data` or a tensor of `state_dict()` | likewise, without a warning |

After running code of the user, and before the next update or forward pass, the caller calls `Replica.check`.
The trainer does so after backward passes and evaluations, a script's job after it has yielded a batch and in
`optimizer.step()`. The checksums that detect a drifted replica do not detect these cases, because they cover
the buffer.

A step must not become slower by this. Each check compares only addresses and identities, in loops that run in
C: about 60 µs for 200 parameters in 150 modules. Names are collected only after a difference.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import is_, methodcaller
from typing import Any

import torch
from torch import nn

from .model_state import ModelError, plain_name

log = logging.getLogger("gradwire.worker")

REMEDY = "do that before job.attach, or in a task where its model is made"


class Binding:
    """Keeps a model's parameters in the replica's memory; the replica creates it and calls it."""

    def __init__(self, model: nn.Module, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        self._model = model
        self._names = [plain_name(name) for name, _ in named]
        self._parameters: list[torch.Tensor] = [parameter for _, parameter in named]
        self._views: Sequence[torch.Tensor] = ()
        self._addresses: list[int] = []
        self._sizes: list[int] = []
        self._versions = [0] * len(named)  # torch's counters of changes in place
        self._warned: set[str] = set()  # kinds of warnings that were logged
        # The dictionaries in which the model's modules hold parameters and modules, and all their values.
        # The objects are kept, so that no new object can get the id of an old one.
        self._holders: list[Any] = []
        self._held: list[Any] = []
        self._values_of: Any = dict.values
        self._known: set[int] = set()  # ids of the parameters that the model had at the last full comparison
        self._others: list[tuple[str, nn.Parameter]] = []  # parameters of the model that the replica lacks
        self._compare_with_model()

    def bind(self, views: Sequence[torch.Tensor]) -> None:
        """Make each parameter a view of the replica's memory. views: memory of each parameter, in order,
        which holds its values already."""
        self._views = views
        for parameter, view in zip(self._parameters, views, strict=True):
            parameter.data = view
        self._addresses = self._addresses_now()
        self._sizes = self._sizes_now()
        self.wrote()

    def check(self) -> bool:
        """Check that the model has the parameters that the job began with, in the replica's memory.

        A parameter that was pointed elsewhere is pointed back, with a warning. Returns True if a parameter
        was pointed back. Raises ModelError if a parameter was added, replaced, removed or converted; the
        message names it, the change and a remedy.
        """
        held = list(chain.from_iterable(map(self._values_of, self._holders)))
        if len(held) != len(self._held) or not all(map(is_, held, self._held)):
            self._compare_with_model()
        for name, parameter in self._others:
            if parameter.requires_grad:
                raise ModelError(
                    f"parameter {name!r} requires a gradient now and did not when the job began, and a job's "
                    "parameters are fixed then; let it require one when the model is made, or give it to "
                    "the optimizer before job.attach, as float32, and freeze it until it is to be trained"
                )
        moved = self._addresses_now() != self._addresses and self._point_back()
        if self._sizes_now() != self._sizes:
            for index in range(len(self._parameters)):
                self._check_tensor(index)
        return moved

    def wrote(self, indices: Iterable[int] | None = None) -> None:
        """Note that Gradwire itself has written to parameters, so that `check_writes` does not warn of them.
        indices: indices of the parameters; None for all of them."""
        for index in range(len(self._parameters)) if indices is None else indices:
            self._versions[index] = self._parameters[index]._version  # pyright: ignore[reportPrivateUsage]

    def check_writes(self, version: int) -> None:
        """Warn once if code other than Gradwire's has written to a parameter in place.

        torch does not count writes through `.data` or numpy; the drift check detects those. version: version
        of the next drift check, for the warning.
        """
        if "written" in self._warned:
            return
        now = [parameter._version for parameter in self._parameters]  # pyright: ignore[reportPrivateUsage]
        if now != self._versions:
            written = [index for index, count in enumerate(now) if count != self._versions[index]]
            self._warn(
                "written",
                "the script or task has written to %s outside of optimizer.step(), as load_state_dict, "
                "clamp_ or Embedding(max_norm=...) do. The server does not hear of that: values that differ "
                "from the job's are replaced at version %d at the latest. To train from other values, %s",
                self._list(written),
                version,
                REMEDY,
            )

    # ---- inside

    def _point_back(self) -> bool:
        """Point parameters back to the replica's memory, and warn; the replica's values count.

        Returns True if a parameter lay elsewhere. Raises ModelError for another dtype, shape or device.
        """
        # The buffer itself may have moved, to shared memory, and the parameters with it.
        self._addresses = [view.data_ptr() for view in self._views]
        moved = [index for index, at in enumerate(self._addresses_now()) if at != self._addresses[index]]
        for index in moved:
            self._check_tensor(index)
        changed: list[int] = []
        for index in moved:
            parameter, view = self._parameters[index], self._views[index]
            if not _same_bits(parameter.data, view):
                changed.append(index)
            parameter.data = view
        self.wrote(moved)
        if changed:
            self._warn(
                "changed",
                "the script or task has replaced the values of %s outside of optimizer.step(): the job's "
                "values are restored, and the new ones are lost. The server holds the parameters and does "
                "not hear of such changes; %s",
                self._list(changed),
                REMEDY,
            )
        elif moved:
            self._warn(
                "moved",
                "the script or task has pointed the data of %s elsewhere, as model.half().float() or "
                "p.data = … does; the values are the job's, and the data is pointed back",
                self._list(moved),
            )
        return bool(moved)

    def _addresses_now(self) -> list[int]:
        return list(map(torch.Tensor.data_ptr, self._parameters))

    def _sizes_now(self) -> list[int]:
        """Return each parameter's number of elements, then whether each is contiguous.

        A slice of a tensor, or a transposed one, begins at the same address as the tensor.
        """
        sizes = map(torch.Tensor.numel, self._parameters)
        return [*sizes, *map(torch.Tensor.is_contiguous, self._parameters)]

    def _check_tensor(self, index: int) -> None:
        """Raise ModelError if a parameter has another dtype, shape, device or layout than its view."""
        now, view = self._parameters[index], self._views[index]
        change = _difference(view, now)
        if not change and now.data_ptr() == view.data_ptr() and now.stride() != view.stride():
            change = f"had strides {view.stride()} when the job began, and has {now.stride()} now"
        if change:
            raise ModelError(f"parameter {self._names[index]!r} {change}; {REMEDY}")

    def _compare_with_model(self) -> None:
        """Compare the model's present parameters with the replica's, by identity and name.

        Warns of added frozen parameters and of new names. Raises ModelError for removed parameters, and for
        added ones that require a gradient.
        """
        first = not self._held
        named = [(plain_name(name), parameter) for name, parameter in self._model.named_parameters()]
        name_of = {id(parameter): name for name, parameter in named}
        ours = {id(parameter) for parameter in self._parameters}
        for index, (name, parameter) in enumerate(zip(self._names, self._parameters, strict=True)):
            if id(parameter) not in name_of:
                raise self._missing(name, index, dict(named).get(name))
        others = [(name, parameter) for name, parameter in named if id(parameter) not in ours]
        added = [(name, parameter) for name, parameter in others if id(parameter) not in self._known]
        for name, parameter in () if first else added:
            if parameter.requires_grad:
                raise ModelError(
                    f"parameter {name!r} was added to the model after the job began, and requires a "
                    "gradient, but a job's parameters are fixed when it begins; "
                    f"{REMEDY}, and freeze it until it is to be trained"
                )
        if added and not first:
            self._warn(
                "added",
                "%s: added to the model after the job began, and frozen: only this worker has it, and the "
                "server's --output lacks it",
                _listed([name for name, _ in added]),
            )
        pairs = zip(self._names, self._parameters, strict=True)
        renamed = [f"{was!r} is {now!r}" for was, each in pairs if (now := name_of[id(each)]) != was]
        if renamed:
            self._warn(
                "renamed",
                "parameters have other names now, as pruning gives them (%s): the job continues to train "
                "them, and saves them under their first names; only this worker's model has the change. To "
                "have it at all workers and in --output, %s",
                ", ".join(renamed[:3]) + (", …" if len(renamed) > 3 else ""),
                REMEDY,
            )
        modules = list(self._model.modules())
        self._holders = [
            holder
            for module in modules
            for holder in (module._parameters, module._modules)  # pyright: ignore[reportPrivateUsage]
        ]
        plain = all(isinstance(holder, dict) for holder in self._holders)
        self._values_of = dict.values if plain else methodcaller("values")  # TorchScript has its own mappings
        self._held = list(chain.from_iterable(map(self._values_of, self._holders)))
        self._known = set(name_of)
        self._others = others

    def _missing(self, name: str, index: int, now: torch.Tensor | None) -> ModelError:
        """Return the error for a parameter that the model lacks. now: the tensor of that name, if any."""
        change = "" if now is None else _difference(self._views[index], now)
        cause = "is not in the model any more" if now is None else "is another tensor now than the job trains"
        return ModelError(
            f"parameter {name!r} {change or cause}, as after load_state_dict(assign=True), tying weights, "
            f"register_parametrization, or replacing or converting a module; {REMEDY}"
        )

    def _list(self, indices: Sequence[int]) -> str:
        return _listed([self._names[index] for index in indices])

    def _warn(self, kind: str, text: str, *arguments: object) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning(text, *arguments)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _difference(was: torch.Tensor, now: torch.Tensor) -> str:
    """Return a clause on how a tensor's dtype, shape or device has changed; "" if none has."""
    for before, after in (
        (str(was.dtype).removeprefix("torch."), str(now.dtype).removeprefix("torch.")),
        (f"of shape {tuple(was.shape)}", f"of shape {tuple(now.shape)}"),
        (f"on {was.device}", f"on {now.device}"),
    ):
        if before != after:
            return f"was {before} when the job began, and is {after} now"
    return ""


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if all values of two tensors are equal; a NaN counts as equal to a NaN."""
    return torch.equal(one, other) or bool(torch.isclose(one, other, rtol=0, atol=0, equal_nan=True).all())
