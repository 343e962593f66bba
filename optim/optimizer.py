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
    """The text that `parse_optimizer` makes the same options of, with all of them."""
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
    """What an optimizer remembers of a stretch of elements that have taken all of their steps together.

    start, end: elements. memory: of these elements, by torch's names.
    """

    start: int
    end: int
    memory: Memory

    def within(self, start: int, end: int, to: int) -> Remembered | None:
        """Its piece between two elements, with the first of these at `to`; None if it has none there."""
        first, last = max(start, self.start), min(end, self.end)
        if first >= last:
            return None
        memory = _Run(self.start, self.end, self.memory).piece(first, last).memory
        return Remembered(first - start + to, last - start + to, memory)


@dataclass(slots=True, eq=False)
class _Run:
    """Elements of a parameter that have taken all of their steps together: torch sees them as one.

    start, end: in the parameter. memory: of these elements.
    """

    start: int
    end: int
    memory: Memory

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """These elements of a tensor like the parameter; the tensor itself where they are all of it."""
        return tensor if self.end - self.start == tensor.numel() else tensor[self.start : self.end]

    def alike(self, other: _Run) -> bool:
        """Whether another one of the same parameters has taken as many steps."""
        import torch

        for what, tensor in self.memory.items():
            theirs = other.memory[what]
            if (tensor is None) != (theirs is None):
                return False
            if what == COUNT and not torch.equal(_present(tensor), _present(theirs)):
                return False
        return True

    def cut(self, borders: Sequence[int]) -> list[_Run]:
        """Its pieces between ascending borders, which go on over the same memory."""
        inside = borders[bisect_right(borders, self.start) : bisect_left(borders, self.end)]
        if not inside:
            return [self]
        return [self.piece(*pair) for pair in pairwise((self.start, *inside, self.end))]

    def within(self, start: int, end: int) -> bool:
        return start <= self.start and self.end <= end

    def alone(self) -> _Run:
        """With memory that is no piece of larger memory: such a view would keep all of it."""
        memory: Memory = dict(self.memory)
        for what, tensor in memory.items():
            if tensor is not None and tensor.nbytes < tensor.untyped_storage().nbytes():
                memory[what] = tensor.clone()
        return _Run(self.start, self.end, memory)

    def piece(self, start: int, end: int) -> _Run:
        """Over the same memory, with a count of its own."""
        memory: Memory = {}
        for what, tensor in self.memory.items():
            if tensor is None:
                memory[what] = None
            elif what == COUNT:
                memory[what] = tensor.clone()
            else:
                memory[what] = tensor[start - self.start : end - self.start]
        return _Run(start, end, memory)


def _joined(runs: Sequence[_Run]) -> list[_Run]:
    """Neighbours that have taken the same steps as one, with memory of its own."""
    import torch

    groups: list[list[_Run]] = []
    for run in runs:
        if groups and groups[-1][0].alike(run):
            groups[-1].append(run)
        else:
            groups.append([run])
    joined: list[_Run] = []
    for group in groups:
        memory: Memory = dict(group[0].memory)
        for what, tensor in memory.items() if len(group) > 1 else ():
            if tensor is not None and what != COUNT:
                memory[what] = torch.cat([_present(run.memory[what]) for run in group])
        joined.append(_Run(group[0].start, group[-1].end, memory))
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
        """Of parameters that are all in one group."""
        group = OptimizerGroup(options=options, learning_rate=learning_rate)
        self._group([group], parameters, [0] * len(parameters))

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
            [_Run(0, each.numel(), self._options(place).memory(each))]
            for place, each in enumerate(self._parameters)
        ]

    def _options(self, place: int) -> OptimizerOptions:
        return self._groups[self._group_of[place]].options

    def follow(self, factor: float) -> None:
        """Have the next step of each group at its own learning rate times this."""
        self.learning_rates = [group.learning_rate * factor for group in self._groups]

    def copy(self) -> Optimizer:
        """Another one of the same parameters, that goes on from what this one remembers."""
        other = Optimizer.of_groups(self._groups, (), self._group_of)
        other.learning_rates = list(self.learning_rates)
        other._parameters = self._parameters
        for runs in self._runs:
            other._runs.append([_Run(run.start, run.end, _copied(run.memory)) for run in runs])
        return other

    def step(self, only: int | None = None, ranges: Sequence[tuple[int, int]] | None = None) -> None:
        """Change the parameters in place. One without a gradient stays as it is, and so does what is
        remembered of it.

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
        runs: list[_Run] = []
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
        """Go on with the same elements in other parameters. All of both are of one dimension, and ranges of
        one buffer. No element comes into another group; group_of: as before, all in the first if empty."""
        known = [_Run(each.start, each.end, each.memory) for each in self.remembered()]
        self._parameters = list(parameters)
        self._group_of = list(group_of) or [0] * len(self._parameters)
        self._go_on_from(known)

    def remembered(self) -> list[Remembered]:
        """All that it remembers, over its own memory, in elements of the buffer that the
        parameters are ranges of; ascending."""
        found: list[Remembered] = []
        for each, runs in zip(self._parameters, self._runs, strict=True):
            at = int(each.storage_offset())
            found += [
                Remembered(at + run.start, at + run.end, run.memory) for run in runs if run.start < run.end
            ]
        return sorted(found, key=lambda each: each.start)

    def recall(self, remembered: Sequence[Remembered]) -> None:
        """Go on from what another optimizer of the same kind remembered of these elements.

        remembered: stretches of the buffer that the parameters are ranges of, which cover all of them.
        """
        self._go_on_from([_Run(each.start, each.end, dict(each.memory)) for each in remembered])

    def _go_on_from(self, known: list[_Run]) -> None:
        """known: in elements of the buffer."""
        known.sort(key=lambda run: run.start)
        ends = [run.end for run in known]
        self._runs = []
        for place, each in enumerate(self._parameters):
            start = int(each.storage_offset())
            borders = (start, start + each.numel())
            among = known[bisect_right(ends, borders[0]) : bisect_left(ends, borders[1]) + 1]
            pieces = [piece for run in among for piece in run.cut(borders) if piece.within(*borders)]
            joined = [run.alone() for run in _joined(pieces)]
            moved = [_Run(run.start - start, run.end - start, run.memory) for run in joined]
            self._runs.append(moved or [_Run(0, 0, self._options(place).memory(each))])

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

    def _within(self, place: int, ranges: Sequence[tuple[int, int]]) -> list[_Run]:
        """The runs of a parameter that are within the ranges; at their borders runs are cut."""
        if not self._runs[place][0].memory:
            return [_Run(start, end, {}) for start, end in ranges]
        borders = sorted({border for pair in ranges for border in pair})
        runs = [piece for run in self._runs[place] for piece in run.cut(borders)]
        self._runs[place] = runs
        starts = [start for start, _ in ranges]
        found: list[_Run] = []
        for run in runs:
            number = bisect_right(starts, run.start) - 1
            if number >= 0 and run.end <= ranges[number][1]:
                found.append(run)
        return found

    def image(self) -> dict[str, Any]:
        """All that it remembers, as plain values and copies of its tensors."""
        runs = [[(run.start, run.end, _copied(run.memory)) for run in runs] for runs in self._runs]
        groups = [optimizer_spec(group.options) for group in self._groups]
        return {"groups": groups, "rates": list(self.learning_rates), "runs": runs}

    @property
    def groups(self) -> Sequence[OptimizerGroup]:
        """How each group is stepped."""
        return self._groups

    def restore(self, image: Mapping[str, Any]) -> None:
        """Go on from an `image` of one like it, of parameters that are divided alike; takes over its
        tensors."""
        self.learning_rates = list(image["rates"])
        self._runs = [[_Run(*run) for run in runs] for runs in image["runs"]]

    def state(self) -> list[tuple[str, int, torch.Tensor]]:
        """What it remembers of parameters that were always stepped whole.

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
