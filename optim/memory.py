"""The state that an optimizer keeps of elements, by runs of elements that have taken their steps together."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from .steps import COUNT

if TYPE_CHECKING:
    import torch

    from .steps import Memory


@dataclass(frozen=True, slots=True, eq=False)
class Remembered:
    """The optimizer's state of a run of adjacent elements that have taken all of their steps together.

    Torch can step such a run as one tensor.

    Attributes:
        start, end: range of elements, counted in a parameter, or in the buffer that the parameters are views
            of.
        memory: state tensors of these elements by torch's name, such as "exp_avg"; empty before their first
            step, and if the optimizer has no state.
    """

    start: int
    end: int
    memory: Memory

    def within(self, start: int, end: int, to: int) -> Remembered | None:
        """Return the state of the elements from `start` to `end`, renumbered so that `start` becomes `to`.

        None if the run has no element in that range.
        """
        first, last = max(start, self.start), min(end, self.end)
        if first >= last:
            return None
        return Remembered(first - start + to, last - start + to, self.piece(first, last).memory)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this run's elements of `tensor`, which has the parameter's shape: `tensor` itself if the run
        covers it."""
        return tensor if self.end - self.start == tensor.numel() else tensor[self.start : self.end]

    def alike(self, other: Remembered) -> bool:
        """Return True if both runs have the same step count, and the same of their state tensors exist."""
        import torch

        if self.memory.keys() != other.memory.keys():
            return False
        for name, tensor in self.memory.items():
            theirs = other.memory[name]
            if (tensor is None) != (theirs is None):
                return False
            if name == COUNT and not torch.equal(present(tensor), present(theirs)):
                return False
        return True

    def cut(self, borders: Sequence[int]) -> list[Remembered]:
        """Return the run cut at those of the ascending `borders` that lie inside; pieces share its memory."""
        inside = borders[bisect_right(borders, self.start) : bisect_left(borders, self.end)]
        if not inside:
            return [self]
        return [self.piece(*pair) for pair in pairwise((self.start, *inside, self.end))]

    def alone(self) -> Remembered:
        """Return a copy with views cloned, so that it does not keep larger tensors alive."""
        memory: Memory = dict(self.memory)
        for name, tensor in memory.items():
            if tensor is not None and tensor.nbytes < tensor.untyped_storage().nbytes():
                memory[name] = tensor.clone()
        return Remembered(self.start, self.end, memory)

    def piece(self, start: int, end: int) -> Remembered:
        """Return the state of elements `start` to `end`: views, and a copy of the step count."""
        memory: Memory = {}
        for name, tensor in self.memory.items():
            if tensor is None:
                memory[name] = None
            elif name == COUNT:
                memory[name] = tensor.clone()
            else:
                memory[name] = tensor[start - self.start : end - self.start]
        return Remembered(start, end, memory)


def joined(runs: Sequence[Remembered]) -> list[Remembered]:
    """Return `runs` with adjacent runs that have the same step count merged into new tensors."""
    import torch

    groups: list[list[Remembered]] = []
    for run in runs:
        if groups and groups[-1][0].alike(run):
            groups[-1].append(run)
        else:
            groups.append([run])
    found: list[Remembered] = []
    for group in groups:
        memory: Memory = dict(group[0].memory)
        for name, tensor in memory.items() if len(group) > 1 else ():
            if tensor is not None and name != COUNT:
                memory[name] = torch.cat([present(run.memory[name]) for run in group])
        found.append(Remembered(group[0].start, group[-1].end, memory))
    return found


def copied(memory: Memory) -> Memory:
    return {name: None if tensor is None else tensor.clone() for name, tensor in memory.items()}


def present(tensor: torch.Tensor | None) -> torch.Tensor:
    """Return `tensor`, which the caller knows not to be None."""
    assert tensor is not None
    return tensor
