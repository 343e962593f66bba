"""Whether the model still trains in the replica's memory.

The replica has one buffer, and each parameter of the model is a view of its place in it: an update that is
written to the buffer is in the model at once. Code of the user can undo that between two steps. The rules:

- Points `parameter.data` elsewhere: `p.data = …`, `model.half().float()`, `flatten_parameters()` on a GPU.
  It is pointed back. The values in the buffer hold; a warning says whether others are lost.
- Changes the dtype, shape or device of a parameter: `ModelError`, with the parameter and what has changed.
- Takes a parameter out of the model, by `load_state_dict(assign=True)`, another module or tied weights:
  `ModelError`.
- Adds a parameter that requires a gradient, or unfreezes one that the replica lacks: `ModelError`.
- Adds a frozen parameter, or renames one, as `torch.nn.utils.prune` does: a warning.
- Writes to a parameter in place: a warning, because the server does not hear of it, and the drift check.

Whoever has run code of the user calls `Replica.check` before the next update or forward pass: the trainer
after backward passes and evaluations, a script's job after it has yielded a batch and in `optimizer.step()`.
The checksums that find a drifted replica do not find these cases: they are of the buffer.

A step must not pay for this. What is compared each time are addresses and identities, in loops that run in C:
about 60 µs for 200 parameters in 150 modules. Names are collected only where something differs.
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
    """A model's parameters and the memory that each of them must lie in."""

    def __init__(self, model: nn.Module, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        """named: the parameters that the job trains, each once."""
        self._model = model
        self._names = [plain_name(name) for name, _ in named]
        self._parameters: list[torch.Tensor] = [parameter for _, parameter in named]
        self._views: Sequence[torch.Tensor] = ()
        self._addresses: list[int] = []
        self._sizes: list[int] = []
        self._versions = [0] * len(named)  # torch's counters of changes in place
        self._said: set[str] = set()  # warnings
        # The dictionaries in which the model's modules hold parameters and modules, and all that is in them.
        # The objects are kept, so that none can get another one's id.
        self._holders: list[Any] = []
        self._held: list[Any] = []
        self._values_of: Any = dict.values
        self._known: set[int] = set()  # ids of the parameters that the model had, as `_look` found them
        self._others: list[tuple[str, nn.Parameter]] = []  # which the replica lacks
        self._look()

    def bind(self, views: Sequence[torch.Tensor]) -> None:
        """Make each parameter a view of the replica's memory. views: one for each, with its values."""
        self._views = views
        for parameter, view in zip(self._parameters, views, strict=True):
            parameter.data = view
        self._addresses = self._addresses_now()
        self._sizes = self._sizes_now()
        self.wrote()

    def check(self) -> bool:
        """Check that the model is the one that the job began with, and point its parameters to their places.

        Returns:
            Whether a parameter was elsewhere.

        Raises:
            ModelError: it is another model; the message names a parameter, what has changed, and the remedy.
        """
        held = list(chain.from_iterable(map(self._values_of, self._holders)))
        if len(held) != len(self._held) or not all(map(is_, held, self._held)):
            self._look()
        for name, parameter in self._others:
            if parameter.requires_grad:
                raise ModelError(
                    f"parameter {name!r} requires a gradient now and did not when the job began, whose "
                    "parameters are fixed by then; let it require one when the model is made, or give it to "
                    "the optimizer before job.attach, and freeze it until its turn comes"
                )
        moved = self._addresses_now() != self._addresses and self._point_back()
        if self._sizes_now() != self._sizes:
            for place in range(len(self._parameters)):
                self._check_tensor(place)
        return moved

    def wrote(self, places: Iterable[int] | None = None) -> None:
        """Note that Gradwire itself has written to parameters; None for all of them."""
        for place in range(len(self._parameters)) if places is None else places:
            self._versions[place] = self._parameters[place]._version  # pyright: ignore[reportPrivateUsage]

    def check_writes(self, version: int) -> None:
        """Warn once if somebody else has written to a parameter in place. What goes through `.data` or numpy
        torch does not count: that the drift check finds.

        version: at which the drift check follows.
        """
        if "written" in self._said:
            return
        now = [parameter._version for parameter in self._parameters]  # pyright: ignore[reportPrivateUsage]
        if now != self._versions:
            written = [place for place, count in enumerate(now) if count != self._versions[place]]
            self._warn(
                "written",
                "the script or task has written to %s outside of optimizer.step(), as load_state_dict, "
                "clamp_ or Embedding(max_norm=...) do. The server does not hear of that: values that are not "
                "the job's are replaced at version %d at the latest. To train from other values, %s",
                self._list(written),
                version,
                REMEDY,
            )

    # ---- inside

    def _point_back(self) -> bool:
        """Point parameters back to the replica's memory, whose values hold.

        Returns whether one was not there. Raises ModelError for another dtype, shape or device.
        """
        # The buffer itself may have moved, to shared memory, and the parameters with it.
        self._addresses = [view.data_ptr() for view in self._views]
        moved = [place for place, at in enumerate(self._addresses_now()) if at != self._addresses[place]]
        for place in moved:
            self._check_tensor(place)
        changed: list[int] = []
        for place in moved:
            parameter, view = self._parameters[place], self._views[place]
            if not _same_bits(parameter.data, view):
                changed.append(place)
            parameter.data = view
        self.wrote(moved)
        if changed:
            self._warn(
                "changed",
                "the script or task has replaced the values of %s outside of optimizer.step(): the job's "
                "values are put back, and the others are lost. The server holds the parameters and does not "
                "hear of such changes; %s",
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
        """Return numbers of elements, and which tensors are contiguous: a part of a tensor, or a transposed
        one, may begin at the same address."""
        sizes = map(torch.Tensor.numel, self._parameters)
        return [*sizes, *map(torch.Tensor.is_contiguous, self._parameters)]

    def _check_tensor(self, place: int) -> None:
        """Raise ModelError if a parameter cannot be a view of its place."""
        now, view = self._parameters[place], self._views[place]
        change = _difference(view, now)
        if not change and now.data_ptr() == view.data_ptr() and not now.is_contiguous():
            change = "was contiguous when the job began, and is not now"
        if change:
            raise ModelError(f"parameter {self._names[place]!r} {change}; {REMEDY}")

    def _look(self) -> None:
        """Compare the parameters that the model has with those of the replica, by name. Raises ModelError."""
        first = not self._held
        named = [(plain_name(name), parameter) for name, parameter in self._model.named_parameters()]
        name_of = {id(parameter): name for name, parameter in named}
        ours = {id(parameter) for parameter in self._parameters}
        for place, (name, parameter) in enumerate(zip(self._names, self._parameters, strict=True)):
            if id(parameter) not in name_of:
                raise self._gone(name, place, dict(named).get(name))
        others = [(name, parameter) for name, parameter in named if id(parameter) not in ours]
        added = [(name, parameter) for name, parameter in others if id(parameter) not in self._known]
        for name, parameter in () if first else added:
            if parameter.requires_grad:
                raise ModelError(
                    f"parameter {name!r} was added to the model after the job began, whose parameters are "
                    f"fixed by then, and requires a gradient; {REMEDY}, and freeze it until its turn comes"
                )
        if added and not first:
            self._warn(
                "added",
                "%s: added to the model after the job began, and frozen: this worker alone has it, and the "
                "server's --output does not",
                _listed([name for name, _ in added]),
            )
        pairs = zip(self._names, self._parameters, strict=True)
        renamed = [f"{was!r} is {now!r}" for was, each in pairs if (now := name_of[id(each)]) != was]
        if renamed:
            self._warn(
                "renamed",
                "parameters have other names now, as pruning gives them (%s): the job trains them on and "
                "saves them under the first ones; what computes with them is this worker's own. To have it "
                "at all workers and in --output, %s",
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
        self._values_of = dict.values if plain else methodcaller("values")  # TorchScript has no dictionaries
        self._held = list(chain.from_iterable(map(self._values_of, self._holders)))
        self._known = set(name_of)
        self._others = others

    def _gone(self, name: str, place: int, now: torch.Tensor | None) -> ModelError:
        change = "" if now is None else _difference(self._views[place], now)
        what = "is not in the model any more" if now is None else "is another tensor now than the job trains"
        return ModelError(
            f"parameter {name!r} {change or what}, as after load_state_dict(assign=True), tying weights, "
            f"register_parametrization, or replacing or converting a module; {REMEDY}"
        )

    def _list(self, places: Sequence[int]) -> str:
        return _listed([self._names[place] for place in places])

    def _warn(self, kind: str, text: str, *arguments: object) -> None:
        """Once for each kind."""
        if kind not in self._said:
            self._said.add(kind)
            log.warning(text, *arguments)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _difference(was: torch.Tensor, now: torch.Tensor) -> str:
    """Return the difference in dtype, shape or device; "" if there is none."""
    for before, after in (
        (str(was.dtype).removeprefix("torch."), str(now.dtype).removeprefix("torch.")),
        (f"of shape {tuple(was.shape)}", f"of shape {tuple(now.shape)}"),
        (f"on {was.device}", f"on {now.device}"),
    ):
        if before != after:
            return f"was {before} when the job began, and is {after} now"
    return ""


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether all values are equal; a NaN is equal to itself."""
    return torch.equal(one, other) or bool(torch.isclose(one, other, rtol=0, atol=0, equal_nan=True).all())
