"""The manifest: a checked list of every parameter tensor of a job, in the order in which payloads refer to
them.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, zip_longest

from ..common.naming import printable
from ..common.parts import LEAST_BYTES, Plan, divide
from ..compressors import TensorSpec
from ..optim.optimizer import OptimizerGroup, check_learning_rate, parse_optimizer
from ..optim.steps import Muon
from . import messages as m
from .entries import SHAPE_LIMIT, check_entries, check_label, is_shape
from .messages import Entry, EntryKind, Tensor
from .refusal import Reason, Refused, refused

DTYPE = "float32"
MAX_SPEC_CHARACTERS = 256
DESCRIPTION_CHARACTERS = 500
DESCRIBED = 10_000  # largest number of tensors and entries of a short manifest


@dataclass(frozen=True)
class Manifest:
    """A checked description of a model. Payloads, plans and checkpoints refer to its tensors by index.

    The elements of all tensors, end to end, are called the flat order.

    Attributes:
        tensors: all tensors, parameters first.
        train_samples: number of samples in one epoch.
        groups: parameter groups, by number; empty for one group with the job's optimizer and learning rate.
        data: checksum of some of the training samples; 0 if they cannot be compared.
        entries: entries of the model's state_dict besides the tensors, in its order.
        clip_norm: largest norm of the mean gradient, as a script names it; 0 for the job's.
        epochs: number of epochs, as a script or its job names it; 0 for the job's.
    """

    tensors: tuple[Tensor, ...]
    train_samples: int
    groups: tuple[m.Group, ...] = ()
    data: int = 0
    entries: tuple[Entry, ...] = ()
    clip_norm: float = 0.0
    epochs: int = 0

    @cached_property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Name and shape of each tensor, in manifest order."""
        return tuple(TensorSpec(name=tensor.name, shape=tensor.shape) for tensor in self.tensors)

    @cached_property
    def elements(self) -> int:
        """Number of elements of all tensors."""
        return sum(spec.elements for spec in self.specs)

    def plan(self, part_bytes: int = 0, slices: int = 1, least_bytes: int = LEAST_BYTES) -> Plan:
        """Return the first plan of the model: its division into parts.

        Args:
            part_bytes: bytes of the largest part, as float32; larger tensors are cut. 0: a default that grows
                with the model.
            slices: number of slices among which the workers of a group divide the parts; each slice receives
                several parts.
            least_bytes: smallest value of that default, in bytes.
        """
        sizes = [spec.elements for spec in self.specs]
        return divide(sizes, part_bytes, slices, least_bytes)

    @cached_property
    def group_of(self) -> tuple[int, ...]:
        """Number of the parameter group of each tensor."""
        return tuple(tensor.group for tensor in self.tensors)

    def optimizer_groups(self, job: OptimizerGroup) -> tuple[OptimizerGroup, ...]:
        """Return the optimizer and learning rate of each parameter group.

        Args:
            job: optimizer and learning rate of the job, for groups that have none of their own.
        """
        return optimizer_groups(self.groups, job)

    @cached_property
    def parameters(self) -> int:
        """Number of tensors that are parameters."""
        return sum(not tensor.state for tensor in self.tensors)

    @cached_property
    def gradient_elements(self) -> int:
        """Number of elements of the parameters, which precede all other tensors."""
        pairs = zip(self.tensors, self.specs, strict=True)
        return sum(spec.elements for tensor, spec in pairs if not tensor.state)

    def tensor_at(self, element: int) -> str:
        """Return "tensor" and the quoted name of the tensor that contains an element of the flat order, for
        messages.
        """
        place = bisect_right(self.ends, element)
        return f"tensor {self.specs[min(place, len(self.specs) - 1)].name!r}"

    def between_tensors(self, element: int) -> bool:
        """Return True if a tensor ends just before this element of the flat order."""
        place = bisect_left(self.ends, element)
        return place < len(self.ends) and self.ends[place] == element

    @cached_property
    def ends(self) -> list[int]:
        """Position in the flat order after the last element of each tensor."""
        return list(accumulate(spec.elements for spec in self.specs))

    @property
    def raw_bytes(self) -> int:
        """Bytes of all tensors as float32."""
        return self.elements * 4

    @property
    def is_short(self) -> bool:
        """Whether the manifest is sent along for the text of a refusal: 1 MB at most, with usual names."""
        return len(self.tensors) + len(self.entries) <= DESCRIBED

    @cached_property
    def fingerprint(self) -> bytes:
        """SHA-256 over tensors, groups with their hyperparameters, and the other entries of the state_dict.

        A tensor counts with its name, shape, dtype and kind. The number of training samples is compared
        separately, so that a refusal names it.
        """
        digest = hashlib.sha256(b"gradwire manifest 2")
        for tensor in self.tensors:
            kind = ":state" if tensor.state else ""
            kind += f":group={tensor.group}" if tensor.group else ""
            digest.update(f";{tensor.name!r}:{tensor.dtype}:{tensor.shape}{kind}".encode())
        for group in self.groups:
            digest.update(f";group:{group.optimizer}:{group.learning_rate!r}".encode())
        for entry in self.entries:
            shape = repr(entry.tied_to) if entry.kind is EntryKind.TIED else entry.shape
            digest.update(f";entry:{entry.name!r}:{entry.kind.label}:{entry.dtype}:{shape}".encode())
            if entry.digest:
                digest.update(f":sha256={entry.digest.hex()}".encode())
        if self.clip_norm:
            digest.update(f";clip:{self.clip_norm!r}".encode())
        if self.epochs:
            digest.update(f";epochs:{self.epochs}".encode())
        return digest.digest()

    def to_message(self) -> m.ModelManifest:
        """Return the message that describes this manifest."""
        return m.ModelManifest(
            tensors=self.tensors,
            train_samples=self.train_samples,
            fingerprint=self.fingerprint,
            groups=self.groups,
            data=self.data,
            entries=self.entries,
            clip_norm=self.clip_norm,
            epochs=self.epochs,
        )

    @staticmethod
    def from_message(message: m.ModelManifest, *, worker: str, max_bytes: int) -> Manifest:
        """Check a received manifest, before memory is allocated for it, and return it.

        Args:
            max_bytes: limit for the bytes of all tensors and entries.

        Raises:
            Refused: SHAPE, DTYPE, TENSOR, NAME, SIZE, MODEL, MALFORMED or GROUP, naming the tensor or group.
        """

        def refuse(reason: Reason, field: str, limit: str, value: str, remedy: str = "") -> Refused:
            return refused(reason, worker=worker, field=field, limit=limit, value=value, remedy=remedy)

        if not message.tensors:
            raise refuse(Reason.TENSOR, "manifest", "at least one parameter tensor", "none")
        if message.train_samples < 1:
            raise refuse(Reason.SIZE, "train_samples", "at least 1", str(message.train_samples))
        if not 0.0 <= message.clip_norm < math.inf:
            limit = "0 or more, and finite"
            raise refuse(Reason.MALFORMED, "clip_norm", limit, str(message.clip_norm))
        _check_groups(message.groups, worker)
        groups = max(1, len(message.groups))
        names: set[str] = set()
        total = 0
        for tensor in message.tensors:
            where = f"tensor {tensor.name!r}"
            if not tensor.name or tensor.name in names:
                raise refuse(Reason.TENSOR, where, "a name of its own", "an empty or repeated one")
            check_label(tensor.name, "tensor", worker)
            names.add(tensor.name)
            if tensor.dtype != DTYPE:
                remedy = "convert the model with .float()"
                raise refuse(Reason.DTYPE, where, DTYPE, tensor.dtype or "no dtype", remedy)
            if tensor.group >= groups:
                limit = f"a parameter group below {groups}, the number of groups"
                raise refuse(Reason.GROUP, where, limit, str(tensor.group))
            # A dimension of 0 is allowed. A hostile shape is refused before its product is computed.
            if not is_shape(tensor.shape):
                raise refuse(Reason.SHAPE, where, SHAPE_LIMIT, str(tensor.shape))
            total += math.prod(tensor.shape) * 4
            if total > max_bytes:
                remedy = "start the server with a larger --max-model-bytes"
                raise refuse(
                    Reason.SIZE, f"manifest up to {where}", f"{max_bytes} bytes", f"{total} bytes", remedy
                )
        check_entries(message.entries, message.tensors, worker=worker, max_bytes=max_bytes - total)
        manifest = Manifest(
            message.tensors,
            message.train_samples,
            message.groups,
            message.data,
            message.entries,
            message.clip_norm,
            message.epochs,
        )
        if message.fingerprint != manifest.fingerprint:
            raise refuse(
                Reason.MODEL, "fingerprint", manifest.fingerprint.hex()[:16], message.fingerprint.hex()[:16]
            )
        return manifest


def first_difference(job: m.ModelManifest, other: m.ModelManifest) -> tuple[str, str]:
    """Return descriptions of the first difference between two models: in the job's, and in the other one.

    Both are empty if the manifests have the same tensors, entries, groups, clip norm and epochs.

    Args:
        job: the job's manifest.
        other: another worker's, as it was received: nothing in it has been checked.
    """
    groups = [f"parameter group {number} with {each.optimizer}" for number, each in enumerate(job.groups)]
    others = [f"parameter group {number} with {each.optimizer}" for number, each in enumerate(other.groups)]
    for kind, ours, theirs in (
        ("parameter", [*map(_described, job.tensors)], [*map(_described, other.tensors)]),
        ("entry of the state_dict", [*map(_described, job.entries)], [*map(_described, other.entries)]),
        ("parameter group", groups, others),
    ):
        for number, (one, two) in enumerate(zip_longest(ours, theirs)):
            if one != two:
                nothing = f"no {kind} after the first {number}"
                return _shown(one or nothing), _shown(two or nothing)
    if job.clip_norm != other.clip_norm:
        return f"clip_norm={job.clip_norm:g}", f"clip_norm={other.clip_norm:g}"
    if job.epochs != other.epochs:
        return f"epochs={job.epochs}", f"epochs={other.epochs}"
    return "", ""


def _shown(description: str) -> str:
    """Return a description of received text, escaped and of limited length."""
    return printable(description[:DESCRIPTION_CHARACTERS])


def _described(tensor: Tensor | Entry) -> str:
    """Return a description of a tensor or entry, with all that a fingerprint covers."""
    if isinstance(tensor, Entry):
        if tensor.kind is EntryKind.TIED:
            return f"entry {tensor.name!r} tied to {tensor.tied_to!r}"
        digest = f" with SHA-256 {tensor.digest.hex()[:16]}" if tensor.digest else ""
        return f"{tensor.kind.label} {tensor.name!r} of {tensor.dtype} {list(tensor.shape)}{digest}"
    kind = "state" if tensor.state else "parameter"
    group = f" in group {tensor.group}" if tensor.group else ""
    return f"{kind} {tensor.name!r} of {tensor.dtype} {list(tensor.shape)}{group}"


def optimizer_groups(groups: Sequence[m.Group], job: OptimizerGroup) -> tuple[OptimizerGroup, ...]:
    """Return the optimizer and learning rate of each parameter group; only `job` if there are no groups.

    Args:
        groups: parameter groups, by number.
        job: optimizer and learning rate of the job, for groups that have none of their own.
    """
    found = [
        OptimizerGroup(
            options=parse_optimizer(each.optimizer),
            learning_rate=job.learning_rate if each.learning_rate is None else each.learning_rate,
        )
        for each in groups
    ]
    return tuple(found) or (job,)


def _check_groups(groups: Sequence[m.Group], worker: str) -> None:
    """Raise Refused: SIZE or GROUP for an invalid parameter group, and name it."""
    for number, group in enumerate(groups):
        where, remedy = f"parameter group {number}", "install the same release of gradwire on both sides"
        if len(group.optimizer) > MAX_SPEC_CHARACTERS:
            limit = f"an optimizer of at most {MAX_SPEC_CHARACTERS} characters"
            value = str(len(group.optimizer))
            raise refused(Reason.SIZE, worker=worker, field=where, limit=limit, value=value)
        try:
            if isinstance(parse_optimizer(group.optimizer), Muon):
                raise ValueError("muon, which workers step by alone")
            if group.learning_rate is not None:
                check_learning_rate(group.learning_rate)
        except ValueError as error:
            raise refused(
                Reason.GROUP,
                worker=worker,
                field=where,
                limit="a known optimizer and a valid learning rate",
                value=str(error),
                remedy=remedy,
            ) from None
