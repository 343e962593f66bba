"""The worker's copy of the parameters, kept bit for bit like every other worker's.

When a part is taken in early, a second buffer keeps its previous values, so that the replica can go back to
the previous version. Therefore a member that has pushed can still take a lost one's slot, and control need
not know how many parts it has taken in. A replica has all parts of the version that `Ready.version` names:
parts that arrive again are passed over.

Nothing but updates may change a replica, but a model's own code can (`Embedding(max_norm=...)`). So the shard
and each worker take a checksum every 64 versions (`proto/replicas`), and assignments carry the shard's. A
worker whose own differs lets go of its replica and opens its stream anew, with `Ready` without a version, as
a worker that has just joined: it is sent a snapshot.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ...compressors import Payload, Plan, add_update, put_update
from ...proto.manifest import DTYPE, Manifest
from ...proto.messages import Content, Tensor, Update
from ...proto.replicas import checksum, next_check
from .binding import Binding
from .groups import ONE_GROUP, ParameterGroups
from .model_state import ModelEntries, ModelError, plain_name

__all__ = ["ModelError", "Replica"]


class Replica:
    """A model's trainable parameters as the manifest orders them: by `named_parameters`.

    They are moved into one buffer, in that order, each with its shape and contiguous; of those in bfloat16 it
    has masters. Each part of it has a version of its own; an update takes it to the next one. What the parts
    are the server says: before `adopt` there are none.

    Parts may be taken to the next version *early*, before the others of it are here; `go_back` undoes that.

    Attributes:
        undone: how often that has happened.
        state: what else belongs to the model.
    """

    _version: int | None = None
    _plan: Plan | None = None
    _before: torch.Tensor | None = None  # what was where parts are that were taken in early
    undone = 0

    def __init__(
        self,
        model: nn.Module,
        train_samples: int,
        groups: ParameterGroups = ONE_GROUP,
        data: int = 0,
        *,
        masters: bool = False,
    ) -> None:
        """
        Args:
            groups: of the parameters. Those in it are part of the replica also while they are frozen.
            data: checksum of some of the samples; 0 if they cannot be compared with other workers'.
            masters: whether the buffer has float32 masters of parameters in bfloat16, which are rounded from
                them after each update. Not where workers step the parameters themselves.

        Raises:
            ModelError: for parameters of another type or without a shape yet, or none at all.
        """
        for name, each in (*model.named_parameters(), *model.named_buffers()):
            if is_lazy(each):
                raise ModelError(
                    f"{name!r} has no shape yet, because its module is lazy; run one batch through the model "
                    "where it is made, or give the module its sizes"
                )
        types = (torch.float32, torch.bfloat16) if masters else (torch.float32,)
        named = [
            (name, p)
            for name, p in model.named_parameters()
            if p.requires_grad or (name in groups.number_of and p.dtype in types)
        ]
        if not any(parameter.requires_grad for _, parameter in named):
            raise ModelError("the model has no parameter that requires a gradient")
        for name, parameter in named:
            if parameter.dtype not in types:
                expected = f"{DTYPE} or bfloat16" if masters else DTYPE
                raise ModelError(
                    f"parameter {name!r}: expected {expected}, got {parameter.dtype}; "
                    "convert the model with .float()"
                )
        self.model = model
        self.parameters = [parameter for _, parameter in named]
        self._tensors: list[torch.Tensor] = [*self.parameters]
        tensors = [
            Tensor(
                name=plain_name(name),
                shape=tuple(p.shape),
                dtype=DTYPE,
                group=groups.number_of.get(name, 0),
            )
            for name, p in named
        ]
        self.state = ModelEntries(model, named)
        self.manifest = Manifest(tuple(tensors), train_samples, groups.groups, data, self.state.entries)
        self._versions: list[int | None] = []
        self._early: set[int] = set()
        self._parts_of: list[list[int]] = []  # by tensor, the parts that it lies in
        self._tensors_in: list[list[int]] = []  # by part
        self._binding = Binding(model, named)
        self._arrange()

    def check(self) -> bool:
        """Check that the model still is what the job began with, and point parameters back to this memory
        where code of the user has pointed them elsewhere. Call it whenever such code may have run: before the
        next forward pass, before gradients are used, and before an update.

        Returns:
            Whether a parameter was elsewhere.

        Raises:
            ModelError: parameters were added, replaced or converted; see `binding`.
        """
        return self._binding.check()

    def check_writes(self) -> None:
        """Warn of parameters that the user's code has written to in place since the last call."""
        self._binding.check_writes(next_check(self._version or 0))

    def wrote(self) -> None:
        """Note that this worker itself has written to the parameters, and `check_writes` is not to warn."""
        self._binding.wrote()

    def include(self, state: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Make named tensors that are no parameters a part of the replica and its manifest."""
        self._tensors += [tensor for _, tensor in state]
        added = [Tensor(name=name, shape=tuple(t.shape), dtype=DTYPE, state=True) for name, t in state]
        self.manifest = replace(self.manifest, tensors=(*self.manifest.tensors, *added))
        self._arrange()

    def _arrange(self) -> None:
        """Lay all tensors end to end in one buffer, so that a part is a range of it; of bfloat16 parameters,
        their masters."""
        with torch.no_grad():
            self._flat = torch.cat([each.detach().reshape(-1).to(torch.float32) for each in self._tensors])
            views = [
                self._flat[start:end].view(tensor.shape)
                if tensor.dtype == torch.float32
                else tensor.data.contiguous()
                for tensor, (start, end) in zip(self._tensors, self._ranges, strict=True)
            ]
            parameters = len(self.parameters)
            self._binding.bind(views[:parameters])
            for tensor, view in zip(self._tensors[parameters:], views[parameters:], strict=True):
                tensor.data = view

    def _round(self, number: int) -> None:
        """Round the bfloat16 parameters in a part from their masters."""
        part = self.plan.parts[number]
        for place in self._tensors_in[number]:
            tensor, first = self._tensors[place], self.plan.starts[place]
            if tensor.dtype != torch.float32:
                start, end = max(first, part.start), min(self.plan.starts[place + 1], part.end)
                tensor.data.view(-1)[start - first : end - first] = self._flat[start:end]

    @property
    def _ranges(self) -> Iterable[tuple[int, int]]:
        """Start and end of each tensor in the buffer."""
        return pairwise((0, *self.manifest.ends))

    @property
    def plan(self) -> Plan:
        """The parts. Not before `adopt`."""
        assert self._plan is not None
        return self._plan

    @property
    def plan_number(self) -> int:
        """0 before there is one."""
        return 0 if self._plan is None else self._plan.number

    def adopt(self, plan: Plan) -> None:
        """Take over a plan. All of its parts have one version."""
        self.go_back()
        self._plan = plan
        self._versions = [self._version] * len(plan.parts)
        self._parts_of = [[] for _ in self._tensors]
        self._tensors_in = [[] for _ in plan.parts]
        unit_of = plan.unit_of()
        for place, (start, end) in enumerate(self._ranges):
            for part in plan.units[unit_of[place]].parts:
                if plan.parts[part].start < end and plan.parts[part].end > start:
                    self._parts_of[place].append(part)
                    self._tensors_in[part].append(place)

    @property
    def version(self) -> int | None:
        """The version that all parts have; None before the first."""
        return self._version

    @version.setter
    def version(self, version: int) -> None:
        self._versions = [version] * len(self._versions)
        self._version = version
        self._early.clear()

    def is_at(self, place: int, version: int) -> bool:
        """Whether all parts of a parameter are at a version."""
        return all(self._versions[part] == version for part in self._parts_of[place])

    def values(self) -> list[npt.NDArray[np.uint8]]:
        """Return every tensor as flat float32 bytes."""
        flat = self._flat.cpu().numpy()
        return [flat[start:end].view(np.uint8) for start, end in self._ranges]

    def checksum(self) -> int:
        """Return the checksum of the whole buffer."""
        return checksum(self._flat.detach().cpu().numpy())

    def let_go(self) -> None:
        """Drop the version: only a whole update can be applied then."""
        self._early.clear()
        self._versions = [None] * len(self._versions)
        self._version = None

    def apply(self, update: Update, payloads: Sequence[Payload], *, early: bool = False) -> None:
        """Apply a part of an update, unless it was applied before."""
        has = self._versions[update.part]
        if (has is not None and update.version <= has) or (not update.whole and has != update.version - 1):
            return
        at = self.plan.parts[update.part].start
        with torch.no_grad():
            if early:
                self._keep(update.part)
            for header, payload in zip(update.payloads, payloads, strict=True):
                take = add_update if header.content is Content.DELTA else put_update
                take(payload, self._flat[at : at + payload.elements])
                at += payload.elements
            self._round(update.part)
        self._versions[update.part] = update.version
        if all(version == update.version for version in self._versions):
            self._version = update.version
            self._early.clear()

    def has_moved(self, place: int) -> bool:
        """Whether a parameter's values differ from those before its parts were taken in early."""
        start, end = self.plan.starts[place : place + 2]
        return self._before is None or not torch.equal(self._flat[start:end], self._before[start:end])

    def _keep(self, number: int) -> None:
        """Keep a part's values, and tell autograd that those it has saved are overwritten."""
        if self._before is None:
            self._before = torch.empty_like(self._flat)
        part = self.plan.parts[number]
        self._before[part.start : part.end] = self._flat[part.start : part.end]
        self._early.add(number)
        self._changed(number)

    def go_back(self) -> None:
        """Put back the parts that were taken to the next version early."""
        if not self._early or self._before is None:
            return
        with torch.no_grad():
            for number in self._early:
                part = self.plan.parts[number]
                self._flat[part.start : part.end] = self._before[part.start : part.end]
                self._versions[number] = self._version
                self._round(number)
                self._changed(number)
        self._early.clear()
        self.undone += 1

    def _changed(self, number: int) -> None:
        """Tell autograd, which does not know that parameters are views of one buffer."""
        for place in self._tensors_in[number]:
            torch.autograd.graph.increment_version(self._tensors[place])
            self._binding.wrote((place,))

    def gradient(self, place: int) -> torch.Tensor | None:
        """Return a gradient, on its parameter's device; None if the loss did not reach it."""
        gradient = self.parameters[place].grad
        return None if gradient is None else as_dense(gradient)

    def gradients(self) -> list[torch.Tensor | None]:
        """Return the gradient of every parameter."""
        return [self.gradient(place) for place in range(len(self.parameters))]


def as_dense(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient as it is pushed: dense, in float32.

    Nearly all are so already. A call of torch that changes nothing takes a microsecond for each tensor.
    """
    found = gradient.detach()
    if found.layout != torch.strided:
        found = found.to_dense()
    return found if found.dtype == torch.float32 else found.to(torch.float32)
