"""A job that begins with the parameters of a file, instead of those of its first worker."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]

from .. import saved
from ..proto.entries import of_kind
from ..proto.manifest import Manifest
from ..proto.messages import Entry
from ..proto.refusal import Reason, Refused, refused
from ..proto.transfer import Bytes
from .durable.state import CHECKPOINT
from .model_state import tensor_of

Tensors = Mapping[str, torch.Tensor]


class ResumeError(ValueError):
    """The file cannot be begun with; the message says why."""


def read_model(path: Path) -> Tensors:
    """By name, all that a file has: a state_dict as safetensors, such as --output is, or a checkpoint, or a
    folder of --state, whose newest it is. Raises ResumeError."""
    try:
        if not path.is_dir():
            tensors: Tensors = load_file(path)
            return tensors
        newest = max(path.glob(f"{CHECKPOINT}*"), default=path)
        return _of_checkpoint(saved.read_folder(newest)[0])
    except (OSError, SafetensorError, saved.DamagedError, KeyError) as error:
        raise ResumeError(
            f"--resume {path}: expected a state_dict as safetensors, a checkpoint, or a folder of --state: "
            f"{error}"
        ) from None


def _of_checkpoint(tree: Mapping[str, Any]) -> Tensors:
    manifest = Manifest.from_message(tree["manifest"], worker="", max_bytes=1 << 62)
    replica = tree["shard"]["downlink"]["replica"]
    flat: torch.Tensor = tree["shard"]["parameters"] if replica is None else replica
    ends = list(accumulate((spec.elements for spec in manifest.specs), initial=0))
    found = {
        spec.name: flat[ends[place] : ends[place + 1]].view(spec.shape)
        for place, spec in enumerate(manifest.specs)
    }
    values: dict[str, Bytes] = {**tree["state"]["frozen"], **tree["state"]["buffers"]}
    entries = {entry.name: entry for entry in manifest.entries}
    return found | {name: tensor_of(entries[name], value) for name, value in values.items()}


def put_in(tensors: Tensors, manifest: Manifest, flat: Bytes, state: dict[str, Bytes], worker: str) -> None:
    """Write a model over what a worker has brought.

    Args:
        flat: float32 values of the manifest's tensors, end to end, as bytes.
        state: of buffers and frozen parameters, by name.
        worker: whom to name.

    Raises Refused: TENSOR, for a model that is another one than the file's.
    """
    values, at = flat.view(np.float32), 0
    for tensor, spec in zip(manifest.tensors, manifest.specs, strict=True):
        if not tensor.state:
            found = _of_name(tensors, spec.name, tuple(spec.shape), worker)
            values[at : at + spec.elements] = found.detach().to(torch.float32).reshape(-1).numpy()
        at += spec.elements
    for entry in of_kind(manifest.entries, frozen=True):
        state[entry.name] = _bytes(_of_name(tensors, entry.name, tuple(entry.shape), worker), entry)


def _of_name(tensors: Tensors, name: str, shape: tuple[int, ...], worker: str) -> torch.Tensor:
    found = tensors.get(name)
    if found is None or tuple(found.shape) != shape:
        value = "none of that name" if found is None else f"one of shape {tuple(found.shape)}"
        raise _other(worker, name, f"a tensor of shape {shape} in the file of --resume", value)
    return found


def _other(worker: str, name: str, limit: str, value: str) -> Refused:
    remedy = "start the server with a file of this model, or the worker with the model of the file"
    return refused(
        Reason.TENSOR, worker=worker, field=f"tensor {name!r}", limit=limit, value=value, remedy=remedy
    )


def _bytes(tensor: torch.Tensor, entry: Entry) -> Bytes:
    flat = tensor.detach().to(getattr(torch, entry.dtype)).reshape(-1).clone()
    return flat.view(torch.uint8).numpy()
