"""Converts the optimizer's state to and from a form by parameter, for scripts that save it (`GetOptimizer`)
or bring it to a new job.

The reducer thread reads the state between two versions, which makes all of it belong to one version.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from ...optim.memory import Remembered
from ...optim.optimizer import OptimizerGroup
from ...optim.steps import COUNT
from ...proto.manifest import Manifest
from ...proto.moments import Moments
from .store import Recall


def recall_of(moments: Moments) -> Recall:
    """Return a function that supplies a store's optimizer with the state from a script's moments. Parameters
    without moments start with empty state."""
    return partial(_remembered, moments)


def _remembered(
    moments: Moments, manifest: Manifest, groups: Sequence[OptimizerGroup]
) -> Sequence[Remembered]:
    """Return the optimizer's state of every parameter, from the moments where there are any."""
    found: list[Remembered] = []
    for number, (spec, end) in enumerate(zip(manifest.specs, manifest.ends, strict=True)):
        if not spec.elements:
            continue
        options, of_tensor = groups[manifest.group_of[number]].options, moments.get(number, {})
        empty = torch.zeros(spec.elements, dtype=torch.float32, device="cpu")
        memory = options.memory(empty) if of_tensor else {}
        for name, values in of_tensor.items():
            # The array of a step count has one element, torch's tensor no dimension.
            memory[name] = torch.from_numpy(values.copy()).view(() if name == COUNT else -1)
        found.append(Remembered(end - spec.elements, end, memory))
    return found


def moments_of(stretches: Sequence[Remembered], manifest: Manifest) -> Moments:
    """Return the optimizer's state of each parameter that has been stepped, by tensor index and name.

    Pieces of one parameter have taken different numbers of steps if a worker was lost while parts of a round
    had been stepped. torch has one number for each parameter, so the largest is used.

    Args:
        stretches: the optimizer's state of ranges in flat order, ascending, which cover all elements.
    """
    found: dict[int, dict[str, npt.NDArray[np.float32]]] = {}
    at = 0
    for number, (spec, end) in enumerate(zip(manifest.specs, manifest.ends, strict=True)):
        start = end - spec.elements
        while at < len(stretches) and stretches[at].end <= start:
            at += 1
        pieces: list[Remembered] = []
        for stretch in stretches[at:]:
            if stretch.start >= end:
                break
            piece = stretch.within(start, end, 0)
            if piece is not None:
                pieces.append(piece)
        if not any(map(_stepped, pieces)):
            continue
        of_tensor: dict[str, npt.NDArray[np.float32]] = {}
        for name in next(piece.memory for piece in pieces if _stepped(piece)):
            if name == COUNT:
                most = max(
                    float(tensor) for piece in pieces if (tensor := piece.memory.get(name)) is not None
                )
                of_tensor[name] = np.array([most], np.float32)
                continue
            values = np.zeros(spec.elements, np.float32)
            for piece in pieces:
                tensor = piece.memory.get(name)
                if tensor is not None:
                    values[piece.start : piece.end] = tensor.numpy()
            of_tensor[name] = values
        if of_tensor:
            found[number] = of_tensor
    return found


def _stepped(piece: Remembered) -> bool:
    """Return True when the optimizer has stepped these elements at least once."""
    count = piece.memory.get(COUNT)
    if count is not None:
        return float(count) > 0
    return any(tensor is not None for tensor in piece.memory.values())
