"""The optimizer's state by parameter, for scripts that save it (`GetOptimizer`) or bring it to a new job.

The reducer thread reads it between two versions, so that all of it belongs to one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from ...optim.optimizer import OptimizerGroup, Remembered
from ...optim.steps import COUNT
from ...proto.manifest import Manifest
from ...proto.moments import Moments
from .store import Recall


def recall_of(moments: Moments) -> Recall:
    """Have an optimizer continue from moments of a script; parameters without any begin anew."""
    return partial(_remembered, moments)


def _remembered(
    moments: Moments, manifest: Manifest, groups: Sequence[OptimizerGroup]
) -> Sequence[Remembered]:
    found: list[Remembered] = []
    for number, (spec, end) in enumerate(zip(manifest.specs, manifest.ends, strict=True)):
        if not spec.elements:
            continue
        options = groups[manifest.group_of[number]].options
        memory = options.memory(torch.zeros(spec.elements))
        for name, values in moments.get(number, {}).items():
            count = name == COUNT
            memory[name] = torch.tensor(float(values[0])) if count else torch.from_numpy(values.copy())
        found.append(Remembered(end - spec.elements, end, memory))
    return found


def moments_of(stretches: Sequence[Remembered], manifest: Manifest) -> Moments:
    """Return the optimizer's state of each parameter that was ever stepped.

    Where pieces of one parameter have taken different numbers of steps, which happens if a worker is lost
    while parts of a round are stepped already, the largest number stands for all of them: torch has one.

    Args:
        stretches: in elements of the flat order, ascending, covering all of them.
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
        for name in pieces[0].memory:
            if name == COUNT:
                most = max(float(tensor) for piece in pieces if (tensor := piece.memory[name]) is not None)
                of_tensor[name] = np.array([most], np.float32)
                continue
            values = np.zeros(spec.elements, np.float32)
            for piece in pieces:
                tensor = piece.memory[name]
                if tensor is not None:
                    values[piece.start : piece.end] = tensor.numpy()
            of_tensor[name] = values
        if of_tensor:
            found[number] = of_tensor
    return found


def _stepped(piece: Remembered) -> bool:
    """Whether the optimizer has ever stepped these elements."""
    count = piece.memory.get(COUNT)
    if count is not None:
        return float(count) > 0
    return any(tensor is not None for tensor in piece.memory.values())
