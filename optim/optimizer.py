"""The optimizer, from what the operator typed: `sgd:momentum=0.9,weight_decay=1e-4`.

Its steps are torch's own (`steps`), so momentum, weight decay and the rest are applied exactly once: on the
server, to the aggregated gradient, or in local mode on each worker, to its own. This module imports torch
only when an optimizer is built.

A model's parameters may be in several *groups*, as in torch's `param_groups`: each with hyperparameters and a
learning rate of its own (`OptimizerGroup`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

from ..common.spec import did_you_mean, known, option_types, parse_one_of
from .steps import COUNT, OPTIMIZERS, OptimizerOptions, check_not_negative

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from .steps import Memories, Memory, Tensors


def parse_optimizer(text: str) -> OptimizerOptions:
    """Raises SpecError, which lists what is known."""
    return parse_one_of("optimizer", text, OPTIMIZERS)


def optimizer_spec(options: OptimizerOptions) -> str:
    """Return the text from which `parse_optimizer` makes the same options."""
    (name,) = (name for name, kind in OPTIMIZERS.items() if kind is type(options))
    texts: list[str] = []
    for field in fields(options):
        value: float | bool = getattr(options, field.name)
        texts.append(f"{field.name}={('on' if value else 'off') if isinstance(value, bool) else repr(value)}")
    return f"{name}:{','.join(texts)}"


def overridden(options: OptimizerOptions, overrides: Mapping[str, object]) -> OptimizerOptions:
    """The options with some of them given anew, by their names here or as torch has them (`betas`).

    Raises ValueError for an unknown name or a value that cannot be.
    """
    types, changes = option_types(cast(Any, type(options))), dict[str, Any](overrides)
    if "betas" in changes and "beta1" in types:
        betas: Any = changes.pop("betas")
        if not isinstance(betas, tuple | list) or len(cast(Sequence[object], betas)) != 2:
            raise ValueError(f"betas: expected two numbers, got {betas!r}")
        changes["beta1"], changes["beta2"] = betas
    for key, value in changes.items():
        if key not in types:
            names = [*types, "lr", *(["betas"] if "beta1" in types else [])]
            hint = f"{did_you_mean(key, names)}; known options: {known(names)}"
            raise ValueError(f"unknown option {key!r}{hint}")
        if types[key] is not bool:
            changes[key] = number(key, value)
        elif not isinstance(value, bool):
            raise ValueError(f"{key}: expected True or False, got {value!r}")
    return replace(options, **changes)


def number(name: str, value: object) -> float:
    """Raises ValueError for what is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name}: expected a number, got {value!r}")
    return float(value)


def check_learning_rate(value: float, name: str = "learning rate") -> None:
    """Raises ValueError for what cannot be one."""
    check_not_negative(name, value)


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerGroup:
    """How the parameters of one group are stepped. learning_rate: the group's own, which a schedule's factor
    is multiplied with."""

    options: OptimizerOptions
    learning_rate: float


@dataclass(frozen=True, slots=True, eq=False)
class Remembered:
    """A run of elements that have taken all of their steps together, so that torch can step them as one.

    start, end: elements, of a parameter or of the buffer that parameters are ranges of. memory: the
    optimizer's state of these elements, by torch's names.
    """

    start: int
    end: int
    memory: Memory

    def within(self, start: int, end: int, to: int) -> Remembered | None:
        """Return its piece between two elements, moved so that the first of these is `to`; None if empty."""
        first, last = max(start, self.start), min(end, self.end)
        if first >= last:
            return None
        return Remembered(first - start + to, last - start + to, self.piece(first, last).memory)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return these elements of a tensor like the parameter; the tensor itself if they are all of it."""
        return tensor if self.end - self.start == tensor.numel() else tensor[self.start : self.end]

    def alike(self, other: Remembered) -> bool:
        """Return whether another run of the same parameter has taken as many steps."""
        import torch

        for what, tensor in self.memory.items():
            theirs = other.memory[what]
            if (tensor is None) != (theirs is None):
                return False
            if what == COUNT and not torch.equal(_present(tensor), _present(theirs)):
                return False
        return True

    def cut(self, borders: Sequence[int]) -> list[Remembered]:
        """Return its pieces between ascending borders, which share its memory."""
        inside = borders[bisect_right(borders, self.start) : bisect_left(borders, self.end)]
        if not inside:
            return [self]
        return [self.piece(*pair) for pair in pairwise((self.start, *inside, self.end))]

    def alone(self) -> Remembered:
        """Return the run without views of larger tensors, which would keep all of their memory."""
        memory: Memory = dict(self.memory)
        for what, tensor in memory.items():
            if tensor is not None and tensor.nbytes < tensor.untyped_storage().nbytes():
                memory[what] = tensor.clone()
        return Remembered(self.start, self.end, memory)

    def piece(self, start: int, end: int) -> Remembered:
        """Return a piece that shares its memory, but for a count of its own."""
        memory: Memory = {}
        for what, tensor in self.memory.items():
            if tensor is None:
                memory[what] = None
            elif what == COUNT:
                memory[what] = tensor.clone()
            else:
                memory[what] = tensor[start - self.start : end - self.start]
        return Remembered(start, end, memory)


def _joined(runs: Sequence[Remembered]) -> list[Remembered]:
    """Join adjacent runs that have taken the same steps, with memory of their own."""
    import torch

    groups: list[list[Remembered]] = []
    for run in runs:
        if groups and groups[-1][0].alike(run):
            groups[-1].append(run)
        else:
            groups.append([run])
    joined: list[Remembered] = []
    for group in groups:
        memory: Memory = dict(group[0].memory)
        for what, tensor in memory.items() if len(group) > 1 else ():
            if tensor is not None and what != COUNT:
                memory[what] = torch.cat([_present(run.memory[what]) for run in group])
        joined.append(Remembered(group[0].start, group[-1].end, memory))
    return joined


def _copied(memory: Memory) -> Memory:
    return {what: None if tensor is None else tensor.clone() for what, tensor in memory.items()}


def _present(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor


class Optimizer:
    """Takes torch's steps, bit for bit, over parameters whose gradient is in `grad`.

    A parameter of one dimension may be several tensors that lie end to end. They are stepped as one for as
    long as they have a gradient at the same steps. From the first step on at which only some have one, each
    stretch of them has a count of its own. All of them are of one group.

    Attributes:
        learning_rates: of the next step, by group.
        leaves_zeros: whether the options of all groups say so.
    """

    def __init__(
        self, options: OptimizerOptions, parameters: Sequence[torch.Tensor], learning_rate: float
    ) -> None:
        """Put all parameters in one group."""
        self._group(
            [OptimizerGroup(options=options, learning_rate=learning_rate)], parameters, [0] * len(parameters)
        )

    @classmethod
    def of_groups(
        cls, groups: Sequence[OptimizerGroup], parameters: Sequence[torch.Tensor], group_of: Sequence[int]
    ) -> Optimizer:
        """group_of: by parameter, the number of its group."""
        made = cls.__new__(cls)
        made._group(groups, parameters, group_of)
        return made

    def _group(
        self, groups: Sequence[OptimizerGroup], parameters: Sequence[torch.Tensor], group_of: Sequence[int]
    ) -> None:
        self._groups = list(groups)
        self._group_of = list(group_of)
        self.follow(1.0)
        self.leaves_zeros = all(group.options.leaves_zeros for group in groups)
        self._parameters = list(parameters)
        self._runs = [
            [Remembered(0, each.numel(), self._options(place).memory(each))]
            for place, each in enumerate(self._parameters)
        ]

    def _options(self, place: int) -> OptimizerOptions:
        return self._groups[self._group_of[place]].options

    def follow(self, factor: float) -> None:
        """Set the learning rate of each group's next step to its own times this factor."""
        self.learning_rates = [group.learning_rate * factor for group in self._groups]

    def copy(self) -> Optimizer:
        """Return another optimizer of the same parameters, with a copy of this one's state."""
        other = Optimizer.of_groups(self._groups, (), self._group_of)
        other.learning_rates = list(self.learning_rates)
        other._parameters = self._parameters
        for runs in self._runs:
            other._runs.append([Remembered(run.start, run.end, _copied(run.memory)) for run in runs])
        return other

    def step(self, only: int | None = None, ranges: Sequence[tuple[int, int]] | None = None) -> None:
        """Change the parameters in place. One without a gradient, and its state, stay as they are.

        Args:
            only: number of one parameter.
            ranges: start and end of the elements of it that have a gradient, ascending and apart; all if
                None.
        """
        if only is not None:
            self._step_group(self._group_of[only], (only,), ranges)
            return
        for group in range(len(self._groups)):
            places = [place for place, number in enumerate(self._group_of) if number == group]
            self._step_group(group, places, ranges)

    def _step_group(
        self, group: int, places: Sequence[int], ranges: Sequence[tuple[int, int]] | None
    ) -> None:
        import torch

        parameters: Tensors = []
        gradients: Tensors = []
        runs: list[Remembered] = []
        for place in places:
            parameter = self._parameters[place]
            if parameter.grad is None:
                continue
            for run in self._runs[place] if ranges is None else self._within(place, ranges):
                runs.append(run)
                parameters.append(run.of(parameter))
                gradients.append(run.of(parameter.grad))
        if not runs:
            return
        memories = {what: [run.memory[what] for run in runs] for what in runs[0].memory}
        options, learning_rate = self._groups[group].options, self.learning_rates[group]
        with torch.no_grad():
            options.step(parameters, gradients, memories, learning_rate)
        for what, tensors in memories.items():
            for run, tensor in zip(runs, tensors, strict=True):
                run.memory[what] = tensor

    def divide(self, parameters: Sequence[torch.Tensor], group_of: Sequence[int] = ()) -> None:
        """Continue with the same elements in other parameters. Old and new ones have one dimension and are
        ranges of one buffer. No element changes its group.

        group_of: by parameter, the number of its group; all in the first if empty.
        """
        known = self.remembered()
        self._parameters = list(parameters)
        self._group_of = list(group_of) or [0] * len(self._parameters)
        self._assign_runs(known)

    def remembered(self) -> list[Remembered]:
        """Return its state in elements of the buffer that the parameters are ranges of, ascending; it shares
        memory with the optimizer."""
        found: list[Remembered] = []
        for each, runs in zip(self._parameters, self._runs, strict=True):
            at = int(each.storage_offset())
            found += [
                Remembered(at + run.start, at + run.end, run.memory) for run in runs if run.start < run.end
            ]
        return sorted(found, key=lambda each: each.start)

    def recall(self, remembered: Sequence[Remembered]) -> None:
        """Continue from the state of another optimizer of the same kind.

        remembered: runs of the buffer that the parameters are ranges of, which cover all of them.
        """
        known = [Remembered(each.start, each.end, dict(each.memory)) for each in remembered]
        self._assign_runs(sorted(known, key=lambda run: run.start))

    def _assign_runs(self, known: Sequence[Remembered]) -> None:
        """Take over the state of each parameter. known: in elements of the buffer, ascending."""
        ends = [run.end for run in known]
        self._runs = []
        for place, each in enumerate(self._parameters):
            start = int(each.storage_offset())
            end = start + each.numel()
            among = known[bisect_right(ends, start) : bisect_left(ends, end) + 1]
            pieces = [piece for run in among for piece in run.cut((start, end))]
            inside = [run for run in pieces if start <= run.start and run.end <= end]
            joined = [run.alone() for run in _joined(inside)]
            moved = [Remembered(run.start - start, run.end - start, run.memory) for run in joined]
            self._runs.append(moved or [Remembered(0, 0, self._options(place).memory(each))])

    def step_apart(
        self,
        place: int,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        places: npt.NDArray[np.int64],
        ranges: Sequence[tuple[int, int]],
    ) -> None:
        """Step elements of the parameter with that number, copied out of it, to the bits that `step` would
        leave if the gradient of all others were 0. Only where `leaves_zeros`.

        places: of these elements in the parameter, ascending. ranges: as in `step`; all of them are in these.
        """
        import torch

        options = self._options(place)
        learning_rate = self.learning_rates[self._group_of[place]]
        with torch.no_grad():
            if not self._runs[place][0].memory:
                options.step([parameter], [gradient], {}, learning_rate)
                return
            for run in self._within(place, ranges):
                first, last = (int(each) for each in places.searchsorted((run.start, run.end)))
                here = torch.from_numpy(places[first:last] - run.start)
                memory = {
                    what: _present(tensor) if what == COUNT else _present(tensor)[here]
                    for what, tensor in run.memory.items()
                }
                memories: Memories = {what: [tensor] for what, tensor in memory.items()}
                options.step([parameter[first:last]], [gradient[first:last]], memories, learning_rate)
                for what, tensor in memory.items():
                    if what != COUNT:
                        _present(run.memory[what])[here] = tensor

    def _within(self, place: int, ranges: Sequence[tuple[int, int]]) -> list[Remembered]:
        """The runs of a parameter that are within the ranges; at their borders runs are cut."""
        if not self._runs[place][0].memory:
            return [Remembered(start, end, {}) for start, end in ranges]
        borders = sorted({border for pair in ranges for border in pair})
        runs = [piece for run in self._runs[place] for piece in run.cut(borders)]
        self._runs[place] = runs
        starts = [start for start, _ in ranges]
        found: list[Remembered] = []
        for run in runs:
            number = bisect_right(starts, run.start) - 1
            if number >= 0 and run.end <= ranges[number][1]:
                found.append(run)
        return found

    def image(self) -> dict[str, Any]:
        """Return its state, as plain values and copies of its tensors."""
        runs = [[(run.start, run.end, _copied(run.memory)) for run in runs] for runs in self._runs]
        groups = [optimizer_spec(group.options) for group in self._groups]
        return {"groups": groups, "rates": list(self.learning_rates), "runs": runs}

    @property
    def groups(self) -> Sequence[OptimizerGroup]:
        """The optimizer and learning rate of each group."""
        return self._groups

    def restore(self, image: Mapping[str, Any]) -> None:
        """Go on from an `image` of one like it, of parameters that are divided alike; takes over its
        tensors."""
        self.learning_rates = list(image["rates"])
        self._runs = [[Remembered(*run) for run in runs] for runs in image["runs"]]

    def state(self) -> list[tuple[str, int, torch.Tensor]]:
        """Return the state of parameters that were always stepped whole.

        Returns (what, number of the parameter, tensor). The optimizer keeps it in these tensors from now on,
        so that it can be copied and replaced.
        """
        import torch

        state: list[tuple[str, int, torch.Tensor]] = []
        for place, (parameter, (run,)) in enumerate(zip(self._parameters, self._runs, strict=True)):
            for what, tensor in run.memory.items():
                if tensor is None:
                    tensor = run.memory[what] = torch.zeros_like(parameter, requires_grad=False)
                state.append((what, place, tensor))
        return state
