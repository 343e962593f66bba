"""Steps parameters by parts and groups. The operator names the optimizer as
`sgd:momentum=0.9,weight_decay=1e-4`.

The steps are torch's own (`steps`). Momentum, weight decay and other state are applied exactly once: by the
server to the aggregated gradient, or in local mode by each worker to its own. This module imports torch only
when an optimizer is built.

A model's parameters may be in several *groups*, as in torch's `param_groups`: each group has hyperparameters
and a learning rate of its own (`OptimizerGroup`).
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

from ..common.spec import did_you_mean, known, option_types, parse_one_of
from .memory import Remembered, copied, joined, present
from .steps import COUNT, OPTIMIZERS, OptimizerOptions, check_not_negative

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from .steps import Memories


def parse_optimizer(text: str) -> OptimizerOptions:
    """Return the options of the optimizer that `text` names, such as `sgd:momentum=0.9`; raise SpecError for
    others."""
    return parse_one_of("optimizer", text, OPTIMIZERS)


def optimizer_spec(options: OptimizerOptions) -> str:
    """Return the spec, with every option, from which `parse_optimizer` makes equal options."""
    (name,) = (name for name, kind in OPTIMIZERS.items() if kind is type(options))
    texts: list[str] = []
    for field in fields(options):
        value: float | bool | int = getattr(options, field.name)
        texts.append(f"{field.name}={('on' if value else 'off') if isinstance(value, bool) else repr(value)}")
    return f"{name}:{','.join(texts)}"


def overridden(options: OptimizerOptions, overrides: Mapping[str, object]) -> OptimizerOptions:
    """Return a copy of `options` with new values; torch's `betas` stands for beta1 and beta2.

    Raises ValueError for an unknown option, or a value that it does not accept.
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
        if types[key] is int:
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{key}: expected a whole number, got {value!r}")
        elif types[key] is not bool:
            changes[key] = number(key, value)
        elif not isinstance(value, bool):
            raise ValueError(f"{key}: expected True or False, got {value!r}")
    return replace(options, **changes)


def number(name: str, value: object) -> float:
    """Return `value` as a float; raise ValueError that begins with `name` if it is not an int or a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name}: expected a number, got {value!r}")
    return float(value)


def check_learning_rate(value: float, name: str = "learning rate") -> None:
    """Raise ValueError that begins with `name` unless `value` is finite and at least 0."""
    check_not_negative(name, value)


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerGroup:
    """The hyperparameters of one group of parameters.

    Attributes:
        learning_rate: base learning rate of the group; a schedule's factor multiplies it.
    """

    options: OptimizerOptions
    learning_rate: float


def _borders(
    parameters: Sequence[torch.Tensor], ends: Sequence[tuple[int, int]]
) -> list[list[tuple[int, int]]]:
    """Return the groups in each parameter, as (end, group) of each stretch of one group, counted in the
    parameter.

    Args:
        parameters: flat views of one buffer.
        ends: (end, group) of each tensor of the buffer, ascending.
    """
    found: list[list[tuple[int, int]]] = []
    for each in parameters:
        start = int(each.storage_offset())
        end, of_parameter = start + each.numel(), list[tuple[int, int]]()
        first = bisect_right(ends, (start, math.inf))
        for border, number in ends[first : bisect_left(ends, (end, 0)) + 1] or [(end, 0)]:
            stop = min(border, end) - start
            if of_parameter and of_parameter[-1][0] == stop:  # a tensor without elements
                continue
            if of_parameter and of_parameter[-1][1] == number:
                of_parameter.pop()
            of_parameter.append((stop, number))
        found.append(of_parameter)
    return found


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Neighbouring elements that one optimizer steps at one rate.

    Attributes:
        start, end: range of elements, counted in a parameter.
        learning_rate: learning rate of the next step.
    """

    start: int
    end: int
    options: OptimizerOptions
    learning_rate: float


if TYPE_CHECKING:
    # A run that takes a step, its stretch, and its elements of the parameter and of the gradient.
    _Piece = tuple[Remembered, _Stretch, torch.Tensor, torch.Tensor]


class Optimizer:
    """Takes torch's optimizer steps, bit for bit, on parameters whose gradients are in `grad`.

    A parameter may be a flat view of a buffer in which tensors of several groups lie end to end. Neighbours
    are stepped as one while they have gradients at the same steps, equal options and equal rates. After that,
    each run of elements has a step count of its own.

    Attributes:
        leaves_zeros: True if a step changes no element whose gradient is 0.
    """

    def __init__(
        self, options: OptimizerOptions, parameters: Sequence[torch.Tensor], learning_rate: float
    ) -> None:
        """Take parameters that form one group. learning_rate: base learning rate."""
        group = OptimizerGroup(options=options, learning_rate=learning_rate)
        self._begin([group], parameters, [[(each.numel(), 0)] for each in parameters])

    @classmethod
    def of_groups(
        cls,
        groups: Sequence[OptimizerGroup],
        parameters: Sequence[torch.Tensor],
        group_of: Sequence[int],
        ends: Sequence[int] = (),
    ) -> Optimizer:
        """Return an optimizer of parameters in several groups.

        Args:
            group_of: index of the group of each parameter, or of each tensor that `ends` names.
            ends: index after the last element of each tensor in the buffer that the parameters are views of;
                empty if each parameter is one tensor.
        """
        made = cls.__new__(cls)
        if ends:
            borders = _borders(parameters, [*zip(ends, group_of, strict=True)])
        else:
            pairs = zip(parameters, group_of, strict=True)
            borders = [[(each.numel(), number)] for each, number in pairs]
        made._begin(groups, parameters, borders)
        return made

    def _begin(
        self,
        groups: Sequence[OptimizerGroup],
        parameters: Sequence[torch.Tensor],
        borders: Sequence[Sequence[tuple[int, int]]],
    ) -> None:
        """Initialize from groups. borders: (end, group) of each group's stretches of each parameter."""
        self._groups = list(groups)
        self._borders = borders
        self.follow(1.0)
        self.leaves_zeros = all(group.options.leaves_zeros for group in groups)
        self._parameters = list(parameters)
        self._runs = [[Remembered(0, each.numel(), {})] for each in self._parameters]

    @property
    def learning_rates(self) -> list[float]:
        """Learning rate of the next step, by group."""
        return self._learning_rates

    @learning_rates.setter
    def learning_rates(self, rates: list[float]) -> None:
        self._learning_rates = rates
        self._settled = dict[int, list[_Stretch]]()

    def _stretches(self, index: int) -> list[_Stretch]:
        """Return the stretches of a parameter for the next step, ascending."""
        if index not in self._settled:
            found: list[_Stretch] = []
            start = 0
            for end, number in self._borders[index]:
                options, rate = self._groups[number].options, self._learning_rates[number]
                if found and (found[-1].options, found[-1].learning_rate) == (options, rate):
                    start = found.pop().start
                found.append(_Stretch(start, end, options, rate))
                start = end
            self._settled[index] = found
        return self._settled[index]

    def follow(self, factor: float) -> None:
        """Set the next step's learning rate of each group to the group's base rate times `factor`."""
        self.learning_rates = [group.learning_rate * factor for group in self._groups]

    def copy(self) -> Optimizer:
        """Return an optimizer of the same parameters with a copy of this one's state."""
        other = Optimizer.of_groups(self._groups, (), ())
        other._borders, other._parameters = self._borders, self._parameters
        other.learning_rates = list(self.learning_rates)
        for runs in self._runs:
            other._runs.append([Remembered(run.start, run.end, copied(run.memory)) for run in runs])
        return other

    def step(self, only: int | None = None, ranges: Sequence[tuple[int, int]] | None = None) -> None:
        """Step the parameters in place. A parameter whose `grad` is None keeps its value and its state.

        Args:
            only: index of the one parameter to step; None for all.
            ranges: with `only`, ranges (start, end) of its elements that have a gradient, ascending and
                disjoint; None for all elements.
        """
        found: list[_Piece] = []
        for index in range(len(self._parameters)) if only is None else (only,):
            parameter = self._parameters[index]
            if parameter.grad is not None:
                found += self._pieces(index, parameter, parameter.grad, ranges)
        self._step_pieces(found)

    def step_copies(
        self, indices: Sequence[int], parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> None:
        """Step copies of the parameters with these indices in place, to the same bits as `step`; the
        optimizer's state is that of the parameters."""
        self._step_pieces([*chain(*map(self._pieces, indices, parameters, gradients))])

    def copy_memory(self, index: int) -> list[Remembered]:
        """Return a copy of a parameter's state, for `restore_memory`."""
        return [Remembered(run.start, run.end, copied(run.memory)) for run in self._runs[index]]

    def restore_memory(self, index: int, memory: Sequence[Remembered]) -> None:
        """Continue from the state of a parameter that `copy_memory` returned, without copying it."""
        self._runs[index] = list(memory)

    def _pieces(
        self,
        index: int,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        ranges: Sequence[tuple[int, int]] | None = None,
    ) -> list[_Piece]:
        runs = self._within(index, [(0, parameter.numel())] if ranges is None else ranges)
        return [(run, stretch, run.of(parameter), run.of(gradient)) for run, stretch in runs]

    @staticmethod
    def _step_pieces(pieces: Sequence[_Piece]) -> None:
        """Step pieces in place, those with equal options and rates in one call."""
        import torch

        alike: dict[tuple[OptimizerOptions, float], list[_Piece]] = {}
        for piece in pieces:
            alike.setdefault((piece[1].options, piece[1].learning_rate), []).append(piece)
        for (options, learning_rate), some in alike.items():
            memories = {name: [run.memory[name] for run, *_ in some] for name in some[0][0].memory}
            parameters, gradients = [each[2] for each in some], [each[3] for each in some]
            with torch.no_grad():
                options.step(parameters, gradients, memories, learning_rate)
            for name, tensors in memories.items():
                for (run, *_), tensor in zip(some, tensors, strict=True):
                    run.memory[name] = tensor

    def divide(self, parameters: Sequence[torch.Tensor]) -> None:
        """Replace the parameters by others that cover the same elements of the same buffer, as flat views of
        it; each element keeps its group and state."""
        known, ends = self.remembered(), list[tuple[int, int]]()
        for each, borders in zip(self._parameters, self._borders, strict=True):
            ends += [(int(each.storage_offset()) + end, number) for end, number in borders]
        self._parameters = list(parameters)
        self._borders = _borders(parameters, sorted(ends))
        self._settled.clear()
        self._assign_runs(known)

    def remembered(self) -> list[Remembered]:
        """Return the state of all elements as ascending runs of the buffer, which share the optimizer's
        memory."""
        found: list[Remembered] = []
        for each, runs in zip(self._parameters, self._runs, strict=True):
            at = int(each.storage_offset())
            found += [
                Remembered(at + run.start, at + run.end, run.memory) for run in runs if run.start < run.end
            ]
        return sorted(found, key=lambda each: each.start)

    def recall(self, remembered: Sequence[Remembered]) -> None:
        """Continue from the state that `remembered` returned in an optimizer with the same options: runs that
        together cover every parameter."""
        known = [Remembered(each.start, each.end, dict(each.memory)) for each in remembered]
        self._assign_runs(sorted(known, key=lambda run: run.start))

    def _assign_runs(self, known: Sequence[Remembered]) -> None:
        """Give each parameter its state out of `known`: ascending runs of the buffer."""
        ends = [run.end for run in known]
        self._runs = []
        for each in self._parameters:
            start = int(each.storage_offset())
            end = start + each.numel()
            among = known[bisect_right(ends, start) : bisect_left(ends, end) + 1]
            pieces = [piece for run in among for piece in run.cut((start, end))]
            inside = [run for run in pieces if start <= run.start and run.end <= end]
            alone = [run.alone() for run in joined(inside)]
            moved = [Remembered(run.start - start, run.end - start, run.memory) for run in alone]
            self._runs.append(moved or [Remembered(0, 0, {})])

    def step_apart(
        self,
        index: int,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        positions: npt.NDArray[np.int64],
        ranges: Sequence[tuple[int, int]],
    ) -> None:
        """Step copies of some elements of parameter `index`, to the same bits as `step` if all other
        gradients were 0.

        Called only if `leaves_zeros`. The optimizer's state of these elements is updated too.

        Args:
            parameter: copied elements, stepped in place; one dimension.
            gradient: their gradients.
            positions: positions of the copied elements in the parameter, ascending.
            ranges: ranges (start, end) of the parameter's elements that take this step, ascending and
                disjoint; they contain all positions.
        """
        import torch

        with torch.no_grad():
            for run, stretch in self._within(index, ranges):
                first, last = (int(each) for each in positions.searchsorted((run.start, run.end)))
                here = torch.from_numpy(positions[first:last] - run.start)
                memory = {
                    name: present(tensor) if name == COUNT else present(tensor)[here]
                    for name, tensor in run.memory.items()
                }
                memories: Memories = {name: [tensor] for name, tensor in memory.items()}
                some = [parameter[first:last]], [gradient[first:last]]
                stretch.options.step(*some, memories, stretch.learning_rate)
                for name, tensor in memory.items():
                    if name != COUNT:
                        present(run.memory[name])[here] = tensor

    def _within(self, index: int, ranges: Sequence[tuple[int, int]]) -> list[tuple[Remembered, _Stretch]]:
        """Return the runs of a parameter that lie in `ranges`, each with its stretch, after cutting the
        parameter's runs at the borders of ranges and stretches. Runs without state get their initial one."""
        stretches = self._stretches(index)
        begins = [each.start for each in stretches]
        borders = sorted({*begins, *(border for pair in ranges for border in pair)})
        runs = [piece for run in self._runs[index] for piece in run.cut(borders)]
        starts = [start for start, _ in ranges]
        found: list[tuple[Remembered, _Stretch]] = []
        for run in runs:
            number = bisect_right(starts, run.start) - 1
            if number >= 0 and run.end <= ranges[number][1]:
                stretch = stretches[bisect_right(begins, run.start) - 1]
                if not run.memory:
                    run.memory.update(stretch.options.memory(run.of(self._parameters[index])))
                found.append((run, stretch))
        if any(run.memory for run in runs):  # runs without state need no borders
            self._runs[index] = runs
        return found

    def image(self) -> dict[str, Any]:
        """Return the optimizer's state, for `restore`: plain values and copies of its tensors."""
        runs = [[(run.start, run.end, copied(run.memory)) for run in runs] for runs in self._runs]
        groups = [optimizer_spec(group.options) for group in self._groups]
        return {"groups": groups, "rates": list(self.learning_rates), "runs": runs}

    @property
    def groups(self) -> Sequence[OptimizerGroup]:
        """Hyperparameters and base learning rate of each group."""
        return self._groups

    def restore(self, image: Mapping[str, Any]) -> None:
        """Continue from an `image` of an optimizer with equal groups and equally divided parameters.

        The optimizer keeps the image's tensors without copying them.
        """
        self.learning_rates = list(image["rates"])
        self._runs = [[Remembered(*run) for run in runs] for runs in image["runs"]]

    def state(self) -> list[tuple[str, int, torch.Tensor]]:
        """Return all state tensors as (torch's name, index of the parameter, tensor), zeros where there is
        none yet.

        The optimizer uses these same tensors from now on, so the caller may copy and overwrite them. Every
        parameter must have been stepped only as a whole.
        """
        import torch

        state: list[tuple[str, int, torch.Tensor]] = []
        for index, (parameter, (run,)) in enumerate(zip(self._parameters, self._runs, strict=True)):
            if not run.memory:
                run.memory.update(self._stretches(index)[0].options.memory(parameter))
            for name, tensor in run.memory.items():
                if tensor is None:
                    tensor = run.memory[name] = torch.zeros_like(parameter, requires_grad=False)
                state.append((name, index, tensor))
        return state
