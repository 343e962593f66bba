"""The start of a job from a file (--resume): its parameters, and the optimizer state of a checkpoint.

Both are taken by tensor, so order, parts and groups may differ. A script may instead upload both from a file
of its own (`InitializeHeader.moments`, `.epoch`, `.steps`).
"""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]

from ...optim.memory import Remembered
from ...optim.optimizer import OptimizerGroup, optimizer_spec, parse_optimizer
from ...optim.steps import memory_names
from ...proto.entries import of_kind
from ...proto.manifest import Manifest
from ...proto.plans import plan_of
from ...proto.refusal import Reason, Refused, refused
from ...proto.state import bytes_of, tensor_of
from ...proto.transfer import Bytes
from ...storage.backends import backend_at, local_copy, shown
from ...storage.checkpoint import FormatError
from ...storage.values import DamagedError
from ..shard.store import EarlierBases
from .folder import CHECKPOINT

log = logging.getLogger("gradwire.server")
Tensors = Mapping[str, torch.Tensor]
ANEW = "versions, epochs and residuals start from zero"


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """Optimizer state of one tensor.

    Attributes:
        spec: spec of the optimizer that wrote the state.
        stretches: state of ranges of the tensor, in order; positions are indices of its elements.
    """

    spec: str
    stretches: Sequence[Remembered]


@dataclass(frozen=True, slots=True, eq=False)
class Resumed:
    """The model that a job begins with, as read from a file.

    Attributes:
        name: path or URL of the file, for messages.
        tensors: parameters and buffers, by name.
        version: version of the checkpoint; None for a state_dict.
        moments: optimizer state, by name of the tensor; None for a state_dict.
        bases: bases of the job's compressor; None for a state_dict, and for a compressor without.
    """

    name: str
    tensors: Tensors
    version: int | None = None
    moments: Mapping[str, Moments] | None = None
    bases: EarlierBases | None = None

    def recall(self, manifest: Manifest, groups: Sequence[OptimizerGroup]) -> Sequence[Remembered] | None:
        """Return the optimizer state to continue from, and log which state that is.

        Args:
            manifest: manifest of the job's model.
            groups: parameter groups of the job's optimizer.

        Returns:
            State of ranges of elements in the manifest's flat order. None if the file has no state, or an
            optimizer of another kind wrote it.
        """
        begins = f"starting with the parameters of {self.name}"
        if self.moments is None:
            log.info("%s, which has no optimizer state; %s", begins, ANEW)
            return None
        begins += f", version {self.version},"
        why = self._misfit(manifest, groups)
        if why:
            log.warning("%s without its optimizer state: %s; %s", begins, why, ANEW)
            return None
        found: list[Remembered] = []
        for spec, start in zip(manifest.specs, (0, *manifest.ends), strict=False):
            pieces = [each.within(0, spec.elements, start) for each in self.moments[spec.name].stretches]
            found += [each for each in pieces if each is not None]
        kinds = ", ".join(sorted({_kind(group) for group in groups}))
        memory = ", ".join(sorted({name for each in found for name in each.memory})) or "stateless"
        log.info("%s and its optimizer state, %s (%s); %s", begins, kinds, memory, ANEW)
        return found

    def _misfit(self, manifest: Manifest, groups: Sequence[OptimizerGroup]) -> str:
        """Return the reason for which the optimizer state does not fit the job's optimizer; empty if it
        fits."""
        assert self.moments is not None
        if any(tensor.state for tensor in manifest.tensors):
            return "in this mode the workers have the optimizer state"
        for tensor in manifest.tensors:
            group, had = groups[tensor.group], self.moments.get(tensor.name)
            if had is None:
                return f"tensor {tensor.name!r} was frozen"
            remembered = memory_names(parse_optimizer(had.spec))
            if _kind(group) != _name(had.spec) or remembered != memory_names(group.options):
                return (
                    f"the optimizer of tensor {tensor.name!r} is {optimizer_spec(group.options)}, and was "
                    f"{had.spec}"
                )
        return ""


def _kind(group: OptimizerGroup) -> str:
    return _name(optimizer_spec(group.options))


def _name(spec: str) -> str:
    return spec.partition(":")[0]


class ResumeError(ValueError):
    """The job cannot begin with the file of --resume; the message has the reason."""


def read_model(where: Path | str) -> Resumed:
    """Read the model that a job is to begin with. Raises ResumeError if the file is missing, damaged or of
    another kind. where: path or URL of a state_dict as safetensors (such as --output writes), of a
    checkpoint, or of a folder of --state, whose newest whole checkpoint is read."""
    try:
        with local_copy(where) as file:
            if file is not None:
                tensors: Tensors = load_file(file)
                return Resumed(shown(where), tensors)
        backend = backend_at(where)
        found = backend.folders(CHECKPOINT)
        for folder in reversed(found):
            try:
                return _of_checkpoint(f"{backend.name}/{folder}", backend.read(folder)[0])
            except DamagedError as error:
                if folder == found[0]:
                    raise
                log.error("cannot use a checkpoint, so the previous one is read: %s", error)
        folder, _, last = backend.name.rpartition("/")
        return _of_checkpoint(backend.name, backend_at(folder or ".").read(last)[0])
    except (OSError, SafetensorError, DamagedError, FormatError, Refused, KeyError) as error:
        raise ResumeError(
            f"--resume {shown(where)}: expected a state_dict as safetensors, a checkpoint, or a folder of "
            f"--state: {error}"
        ) from None


def _of_checkpoint(name: str, tree: Mapping[str, Any]) -> Resumed:
    """Return the model of a checkpoint. `tree` is the checkpoint's content."""
    manifest = Manifest.from_message(tree["manifest"], worker="", max_bytes=1 << 62)
    replica = tree["shard"]["downlink"]["replica"]
    flat: torch.Tensor = tree["shard"]["parameters"] if replica is None else replica
    ranges = [*pairwise((0, *manifest.ends))]
    pairs = zip(manifest.specs, ranges, strict=True)
    found = {spec.name: flat[start:end].view(spec.shape) for spec, (start, end) in pairs}
    values: dict[str, Bytes] = {**tree["state"]["frozen"], **tree["state"]["buffers"]}
    entries = {entry.name: entry for entry in manifest.entries}
    found |= {name: tensor_of(entries[name], value) for name, value in values.items()}
    optimizer: Mapping[str, Any] = tree["shard"]["optimizer"]
    specs: Sequence[str] = optimizer["groups"]
    stretches = [
        Remembered(part.start + start, part.start + end, memory)
        for part, runs in zip(plan_of(tree["plan"], manifest).parts, optimizer["runs"], strict=True)
        for start, end, memory in runs
    ]
    stretches.sort(key=lambda each: each.start)
    ends = [each.end for each in stretches]
    moments: dict[str, Moments] = {}
    for tensor, (start, end) in zip(manifest.tensors, ranges, strict=True):
        among = stretches[bisect_right(ends, start) : bisect_left(ends, end) + 1]
        pieces = [each.within(start, end, 0) for each in among]
        moments[tensor.name] = Moments(specs[tensor.group], [each for each in pieces if each is not None])
    shared: Mapping[int, Any] = tree["shard"]["shared"] or {}
    by_name = {manifest.specs[index].name: values for index, values in shared.items()}
    bases = EarlierBases(tree["shard"]["compressor"], by_name) if by_name else None
    return Resumed(name, found, tree["shard"]["version"], moments, bases)


def put_in(tensors: Tensors, manifest: Manifest, flat: Bytes, state: dict[str, Bytes], worker: str) -> None:
    """Overwrite the parameters that a worker has uploaded with those of the file of --resume.

    Args:
        tensors: tensors of the file, by name.
        manifest: manifest of the worker's model.
        flat: float32 values of the manifest's tensors, end to end, as bytes; overwritten.
        state: bytes of buffers and frozen parameters, by name; the frozen parameters are overwritten.
        worker: id of the worker, for the message.

    Raises:
        Refused: TENSOR, if the worker's model is not the file's.
    """
    values, at = flat.view(np.float32), 0
    for tensor, spec in zip(manifest.tensors, manifest.specs, strict=True):
        if not tensor.state:
            found = _of_name(tensors, spec.name, tuple(spec.shape), worker)
            values[at : at + spec.elements] = found.detach().to(torch.float32).reshape(-1).numpy()
        at += spec.elements
    for entry in of_kind(manifest.entries, frozen=True):
        found = _of_name(tensors, entry.name, tuple(entry.shape), worker)
        state[entry.name] = bytes_of(found.to(getattr(torch, entry.dtype)))


def _of_name(tensors: Tensors, name: str, shape: tuple[int, ...], worker: str) -> torch.Tensor:
    """Return the tensor of that name, which must have that shape. Raises Refused: TENSOR."""
    found = tensors.get(name)
    if found is None or tuple(found.shape) != shape:
        raise refused(
            Reason.TENSOR,
            worker=worker,
            field=f"tensor {name!r}",
            limit=f"a tensor of shape {shape} in the file of --resume",
            value="none of that name" if found is None else f"one of shape {tuple(found.shape)}",
            remedy="start the server with a file of this model, or the worker with the model of the file",
        )
    return found
