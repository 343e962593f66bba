"""The worker's copy of the parameters, kept bit for bit like every other worker's.

A part may be applied early, before the other parts of its version have arrived. A second buffer then keeps
the part's previous values, so that the replica can return to the previous version. Therefore a member that
has pushed can still take a lost member's slot, and control need not know which parts it has applied. A
replica has all parts of the version that `Ready.version` names: parts that arrive again are ignored.

Only updates may change a replica, but a model's own code can change it too (`Embedding(max_norm=...)`). The
shard and each worker therefore take a checksum every 64 versions (`proto/replicas`), and assignments carry
the shard's. A worker whose checksum differs invalidates its replica. It opens a new stream, with a `Ready`
without a version, like a worker that has just joined, and the server sends a snapshot.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ...common.parts import Plan
from ...compressors import AbsentPayload, Payload, add_update, put_update
from ...proto.manifest import DTYPE, Manifest
from ...proto.messages import Content, Tensor, Update
from ...proto.replicas import checksum, next_check
from .binding import Binding
from .groups import ONE_GROUP, ParameterGroups
from .model_state import ModelEntries, ModelError, plain_name
from .shared import SharedState
from .sharing import are_one, pairs_on_one_memory, repeats_elements, used_elsewhere

__all__ = ["ModelError", "Replica", "trained_parameters"]


def trained_parameters(
    model: nn.Module, groups: ParameterGroups, *, masters: bool
) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that a job trains, with their names, each once. Raises ModelError if a parameter
    has an unsupported dtype, or shares memory with another one.
    """
    types = (torch.float32, torch.bfloat16) if masters else (torch.float32,)
    named = [
        (name, p)
        for name, p in model.named_parameters()
        if p.requires_grad or (name in groups.number_of and p.dtype == torch.float32)
    ]
    for name, parameter in named:
        if parameter.dtype not in types:
            expected = f"{DTYPE} or bfloat16" if masters else DTYPE
            raise ModelError(
                f"parameter {name!r}: expected {expected}, got {parameter.dtype}; "
                "convert the model with .float()"
            )
    own_memory = "give it memory of its own: p.data = p.data.clone()"
    shaped = [(plain_name(name), parameter) for name, parameter in named if not is_lazy(parameter)]
    for name, parameter in shaped:
        if repeats_elements(parameter):
            raise ModelError(
                f"parameter {name!r}, of shape {tuple(parameter.shape)}: several of its elements are the "
                f"same memory, as after expand(); {own_memory}"
            )
    for first, second in pairs_on_one_memory([parameter for _, parameter in shaped]):
        (name, one), (other, two) = shaped[first], shaped[second]
        part = "their" if are_one(one, two) else "a part of their"
        raise ModelError(
            f"parameters {name!r} and {other!r} share {part} memory, and the optimizer steps both; to tie "
            f"them, make them one parameter, as by model.b.weight = model.a.weight. Otherwise take one of "
            f"them and {own_memory}"
        )
    return named


class Replica:
    """A model's trainable parameters in one float32 buffer, in the order of `named_parameters`.

    Parameters are views of the buffer. Two kinds are not, and get copies of its values: those in bfloat16,
    rounded from their masters in the buffer, and those whose memory others use (`sharing`). The server's plan
    divides the buffer into parts; before `adopt` there is none. Each part has a version of its own, and an
    update takes a part to the next version. A part may be applied *early*, before the other parts of its
    version have arrived; `go_back` undoes that.

    Attributes:
        shared: the job's state beside the values; None for a compressor without bases.
        parameters: the model's trainable parameters, and frozen ones that are in a parameter group.
        groups: parameter groups, by number; empty for one group with the job's optimizer and learning rate.
        group_of: number of the group of each of `parameters`.
        undone: number of times that `go_back` has undone early parts.
    """

    _version: int | None = None
    _plan: Plan | None = None
    _before: torch.Tensor | None = None  # like the buffer; holds the previous values of early parts
    undone = 0
    shared: SharedState | None = None

    def __init__(
        self,
        model: nn.Module,
        train_samples: int,
        groups: ParameterGroups = ONE_GROUP,
        data: int = 0,
        *,
        masters: bool = False,
        frozen_here: bool = False,
        epochs: int = 0,
    ) -> None:
        """Move the model's parameters into one buffer. Raises ModelError if a parameter has an unsupported
        dtype, no shape yet, or memory of another one; or the model has no trainable parameter.

        Args:
            groups: parameter groups. Their float32 parameters are part of the replica even while frozen.
            data: checksum of a few samples, from `data_checksum`; 0 if it cannot be compared.
            masters: True if bfloat16 parameters are allowed: the buffer has float32 masters of them. False
                where workers step the parameters themselves.
            frozen_here: True if frozen parameters stay at the workers.
            epochs: number of epochs of a script's job; 0 if the server knows it.
        """
        for name, each in (*model.named_parameters(), *model.named_buffers()):
            if is_lazy(each):
                raise ModelError(
                    f"{name!r} has no shape yet, because its module is lazy; run one batch through the model "
                    "where it is made, or give the module its sizes"
                )
        named = trained_parameters(model, groups, masters=masters)
        if not any(parameter.requires_grad for _, parameter in named):
            raise ModelError("the model has no parameter that requires a gradient")
        self.model = model
        self.parameters = [parameter for _, parameter in named]
        self._tensors: list[torch.Tensor] = [*self.parameters]
        self._apart: list[bool] = []  # by tensor, True if it is no view of the buffer
        self.groups = groups.groups
        self.group_of = [groups.number_of.get(name, 0) for name, _ in named]
        tensors = [
            Tensor(
                name=plain_name(name),
                shape=tuple(p.shape),
                dtype=DTYPE,
                group=number if groups.at_server else 0,
            )
            for (name, p), number in zip(named, self.group_of, strict=True)
        ]
        self.state = ModelEntries(model, named, frozen_here=frozen_here)
        sent = groups.groups if groups.at_server else ()
        self.manifest = Manifest(
            tuple(tensors), train_samples, sent, data, self.state.entries, groups.clip_norm, epochs
        )
        self._versions: list[int | None] = []
        self._early: set[int] = set()
        self._parts_of: list[list[int]] = []  # by tensor, numbers of the parts that contain elements of it
        self._tensors_in: list[list[int]] = []  # by part, indices of the tensors with elements in it
        self._binding = Binding(model, named)
        self._arrange()

    def check(self) -> bool:
        """Check the parameters (`Binding.check`). Call it after code of the user may have run: before a
        forward pass, before gradients are used, before an update."""
        return self._binding.check()

    def check_writes(self) -> None:
        """Warn, once in a job, if the user's code has written to parameters in place."""
        self._binding.check_writes(next_check(self._version or 0))

    def wrote(self) -> None:
        """Note that Gradwire itself has written to the parameters, so that `check_writes` does not warn."""
        self._binding.wrote()

    def include(self, state: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Add tensors that are not parameters, such as optimizer state, to the replica and its manifest.
        state: names and float32 tensors; they become views of the buffer."""
        self._tensors += [tensor for _, tensor in state]
        added = [Tensor(name=name, shape=tuple(t.shape), dtype=DTYPE, state=True) for name, t in state]
        self.manifest = replace(self.manifest, tensors=(*self.manifest.tensors, *added))
        self._arrange()

    def _arrange(self) -> None:
        """Copy all tensors end to end into one buffer, and make the float32 ones views of it.

        A part is a range of the buffer. For a bfloat16 parameter the buffer holds the master.
        """
        with torch.no_grad():
            if not self._apart:  # later the buffer itself is a user of their memory
                self._apart = [
                    shared or tensor.dtype != torch.float32
                    for tensor, shared in zip(self._tensors, used_elsewhere(self._tensors), strict=True)
                ]
            self._apart += [False] * (len(self._tensors) - len(self._apart))
            self._flat = torch.cat([each.detach().reshape(-1).to(torch.float32) for each in self._tensors])
            views = [
                tensor.data if apart else self._flat[start:end].view(tensor.shape)
                for tensor, apart, (start, end) in zip(self._tensors, self._apart, self._ranges, strict=True)
            ]
            parameters = len(self.parameters)
            self._binding.bind(views[:parameters])
            for tensor, view in zip(self._tensors[parameters:], views[parameters:], strict=True):
                tensor.data = view

    def _copy_out(self, number: int) -> None:
        """Copy the values in part `number` to the parameters that are no views of the buffer."""
        part = self.plan.parts[number]
        for index in self._tensors_in[number]:
            if not self._apart[index]:
                continue
            values, (first, last) = self._tensors[index].data, self.plan.starts[index : index + 2]
            if values.is_contiguous():
                start, end = max(first, part.start), min(last, part.end)
                values.view(-1)[start - first : end - first] = self._flat[start:end]
            else:
                values.copy_(self._flat[first:last].view(values.shape))

    @property
    def _ranges(self) -> Iterable[tuple[int, int]]:
        return pairwise((0, *self.manifest.ends))

    @property
    def plan(self) -> Plan:
        """Plan that divides the buffer into parts. Not available before `adopt`."""
        assert self._plan is not None
        return self._plan

    @property
    def plan_number(self) -> int:
        """Number of the plan, from 1; 0 before the first plan."""
        return 0 if self._plan is None else self._plan.number

    def adopt(self, plan: Plan) -> None:
        """Divide the buffer by a new plan, all of whose parts get the replica's version; undo early parts."""
        self.go_back()
        self._plan = plan
        self._versions = [self._version] * len(plan.parts)
        self._parts_of = [[] for _ in self._tensors]
        self._tensors_in = [[] for _ in plan.parts]
        unit_of = plan.unit_of()
        for index, (start, end) in enumerate(self._ranges):
            for part in plan.units[unit_of[index]].parts:
                if plan.parts[part].start < end and plan.parts[part].end > start:
                    self._parts_of[index].append(part)
                    self._tensors_in[part].append(index)

    @property
    def version(self) -> int | None:
        """Version that all parts have, apart from parts applied early; None before the first version."""
        return self._version

    @version.setter
    def version(self, version: int) -> None:
        """Declare that the present values of the parameters are those of `version`."""
        for tensor, apart, (start, end) in zip(self._tensors, self._apart, self._ranges, strict=True):
            if apart and tensor.dtype == torch.float32:  # a bfloat16 parameter has its master in the buffer
                self._flat[start:end] = tensor.data.reshape(-1)
        self._versions = [version] * len(self._versions)
        self._version = version
        self._early.clear()
        self._settle()

    def _settle(self) -> None:
        if self.shared is not None:
            self.shared.settle()

    def is_at(self, index: int, version: int) -> bool:
        """Return True if all parts of the tensor with this index have a version, also if applied early."""
        return all(self._versions[part] == version for part in self._parts_of[index])

    def values(self) -> list[npt.NDArray[np.uint8]]:
        """Return the bytes of every tensor's float32 values: flat uint8, on the CPU views of the buffer."""
        flat = self._flat.cpu().numpy()
        return [flat[start:end].view(np.uint8) for start, end in self._ranges]

    def checksum(self) -> int:
        """Return the CRC-32C of the whole buffer, as the server computes it over its own."""
        return checksum(self._flat.detach().cpu().numpy())

    def invalidate(self) -> None:
        """Drop the version, because the values are wrong: only a whole update can be applied then."""
        self._early.clear()
        self._settle()
        self._versions = [None] * len(self._versions)
        self._version = None

    def apply(self, update: Update, payloads: Sequence[Payload], *, early: bool = False) -> None:
        """Apply a part of an update, unless the part has that version already or lacks the previous one.

        Args:
            payloads: payloads of the part, end to end: new values, differences or gradients; then those of
                the state beside them.
            early: True to keep the previous values, because other parts of the version are missing.
        """
        has = self._versions[update.part]
        if (has is not None and update.version <= has) or (not update.whole and has != update.version - 1):
            return
        at = self.plan.parts[update.part].start
        with torch.no_grad():
            if early:
                self._keep(update.part)
            gradients: list[tuple[int, Payload, torch.Tensor]] = []
            for header, payload in zip(update.payloads, payloads, strict=False):
                here = self._flat[at : at + payload.elements]
                if header.content is Content.GRADIENT and not isinstance(payload, AbsentPayload):
                    gradients.append((bisect_right(self.plan.starts, at) - 1, payload, here))
                else:
                    write = add_update if header.content is Content.DELTA else put_update
                    write(payload, here)
                at += payload.elements
            if gradients:
                assert self.shared is not None, "gradients are of tensors with bases alone"
                self.shared.step(gradients, update)
            if self.shared is not None:
                self.shared.take(update.beside, payloads[len(update.payloads) :])
            self._copy_out(update.part)
        self._versions[update.part] = update.version
        if all(version == update.version for version in self._versions):
            self._version = update.version
            self._early.clear()
            self._settle()

    def has_moved(self, index: int) -> bool:
        """Return True if early parts have changed a tensor's values. index: index of the tensor, all of whose
        parts were applied early."""
        start, end = self.plan.starts[index : index + 2]
        return self._before is None or not torch.equal(self._flat[start:end], self._before[start:end])

    def _keep(self, number: int) -> None:
        """Copy a part's values aside, and tell autograd that its tensors are being overwritten."""
        if self._before is None:
            self._before = torch.empty_like(self._flat)
        part = self.plan.parts[number]
        self._before[part.start : part.end] = self._flat[part.start : part.end]
        self._early.add(number)
        if self.shared is not None:
            self.shared.keep(self._tensors_in[number])
        self._changed(number)

    def go_back(self) -> None:
        """Restore the previous values and version of parts that were applied early."""
        if not self._early or self._before is None:
            return
        with torch.no_grad():
            for number in self._early:
                part = self.plan.parts[number]
                self._flat[part.start : part.end] = self._before[part.start : part.end]
                self._versions[number] = self._version
                self._copy_out(number)
                self._changed(number)
        if self.shared is not None:
            self.shared.go_back()
        self._early.clear()
        self.undone += 1

    def _changed(self, number: int) -> None:
        """Tell autograd that a part's tensors have changed: it does not know that they share one buffer."""
        for index in self._tensors_in[number]:
            torch.autograd.graph.increment_version(self._tensors[index])
            self._binding.wrote((index,))

    def gradient(self, index: int) -> torch.Tensor | None:
        """Return a parameter's gradient, dense float32, on its device; None if the loss did not reach it."""
        gradient = self.parameters[index].grad
        return None if gradient is None else as_dense(gradient)

    def gradients(self) -> list[torch.Tensor | None]:
        """Return all parameters' gradients, dense float32; None for those that the loss did not reach."""
        return [self.gradient(index) for index in range(len(self.parameters))]


def as_dense(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient as a dense float32 tensor, the form in which it is pushed.

    Most gradients have this form already and share the result's memory.
    """
    # No call without need: one that changes nothing still takes a microsecond for each tensor.
    found = gradient.detach()
    if found.layout != torch.strided:
        found = found.to_dense()
    return found if found.dtype == torch.float32 else found.to(torch.float32)
