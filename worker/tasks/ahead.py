"""Forward passes that begin before their assignment has arrived, while the previous update is still arriving.

The server says which samples are likely to follow (`Assignment.next`). With `--overlap both` parts of the
next version arrive one by one, and each operation of the forward pass waits for the parts that its parameters
lie in. The pass runs in a torch mode that sees the arguments of every call, so it finds a parameter wherever
it is used. Hooks before each module's forward would miss a parent that uses a child's weight, a penalty on
all parameters, and copies of parameters, which autograd does not follow.

The mode does not see compiled code and other threads. Early passes therefore end for the job once

- torch.compile has looked at a frame,
- the loss has used a parameter that the mode did not see, or
- autograd has found that a tensor that it had saved was changed.

Backward waits for the assignment. If the assignment is not the expected one, the pass is discarded, and the
model's buffers and torch's random state are restored. Therefore no result depends on early passes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ...proto import messages as m
from ..session.session import Session
from ..session.timing import StepTimes
from ..training.local import LocalStep
from .computation import Computation, TaskFailedError

POLL_S = 1.0

# Attributes and methods of a tensor that do not read its values. Every other one waits for the parameter.
_ABOUT = frozenset(
    {"shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad", "is_leaf", "is_cuda"}
    | {"size", "dim", "numel", "nelement", "is_floating_point", "is_complex", "stride", "is_contiguous"}
    | {"__hash__", "__len__", "element_size", "get_device"}
)


class DistrustedError(Exception):
    """A forward pass may have used a parameter that it did not wait for. The message says why."""


class Stopped(BaseException):  # no Exception, so that no task handles it
    """Raised within a forward pass to end it when it is no longer needed."""


class _Watch(TorchFunctionMode):
    """A torch mode that calls `needed` with the index of each parameter just before its first use."""

    def __init__(self, parameters: Sequence[torch.Tensor], needed: Callable[[int], None]) -> None:
        super().__init__()
        self.unseen = {id(parameter): index for index, parameter in enumerate(parameters)}  # not used yet
        self._needed = needed

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.unseen and _name(func) not in _ABOUT:
            self._look(args)
            self._look(kwargs.values())
        return func(*args, **kwargs)

    def _look(self, values: Collection[Any]) -> None:
        """Call `needed` for each unseen parameter in a nest of lists, tuples and dicts."""
        for value in values:
            if isinstance(value, torch.Tensor):
                index = self.unseen.get(id(value))
                if index is not None:
                    self._needed(index)
                    del self.unseen[id(value)]
            elif isinstance(value, list | tuple):
                self._look(value)  # pyright: ignore[reportUnknownArgumentType]
            elif isinstance(value, dict):
                self._look(value.values())  # pyright: ignore[reportUnknownArgumentType]


def _name(function: Any) -> str:
    """Return the name of a function, or of the attribute that it reads or sets."""
    name: str = getattr(function, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        name = getattr(getattr(function, "__self__", None), "__name__", "")
    return name


@dataclass(frozen=True, slots=True, eq=False)
class Early:
    """Work begun before its assignment arrived: a forward pass, or a round of local steps.

    `look_ahead` and the driver make one; the driver uses it or undoes it when the next assignment arrives.

    Attributes:
        after: id of the assignment that was answered just before.
        undone: the replica's `undone` when the work began; another value means that parameters were reset.
        undo: restores everything the work has changed: buffers, random state, optimizer.
        loss: loss of a forward pass; None for a round.
        step: a round's local steps; None for a forward pass.
    """

    expected: m.Assignment
    after: int
    undone: int
    undo: Callable[[], None]
    loss: torch.Tensor | None = None
    step: LocalStep | None = None

    @property
    def forward_loss(self) -> torch.Tensor:
        """Loss of work that is a forward pass, a scalar tensor with a gradient."""
        assert self.loss is not None
        return self.loss

    def fits(self, session: Session, assignment: m.Assignment) -> bool:
        """Return True if `assignment` is new and expected, and no parameter was reset since then."""
        return (
            session.is_new(assignment)
            and session.replica.undone == self.undone
            and is_expected(assignment, self.expected)
        )


def expected_after(assignment: m.Assignment) -> m.Assignment:
    """Return the assignment that `assignment.next` announces, at the next version."""
    return replace(assignment, version=assignment.version + 1, ranges=assignment.next, next=())


def is_expected(assignment: m.Assignment, expected: m.Assignment) -> bool:
    """Return True if `assignment` asks for the work of `expected` alone, without evaluation or parts."""
    return (
        not assignment.finished
        and not assignment.evaluate_epoch
        and not assignment.parts
        and (assignment.version, assignment.epoch, assignment.ranges, assignment.position)
        == (expected.version, expected.epoch, expected.ranges, expected.position)
        and (assignment.slice, assignment.slices, assignment.stragglers)
        == (expected.slice, expected.slices, expected.stragglers)
    )


def look_ahead(
    session: Session,
    computation: Computation,
    times: StepTimes,
    expected: m.Assignment,
    first_batch: Callable[[int], slice],
    *,
    after: int,
    seeds: Sequence[int],
) -> Early | None:
    """Run the first forward pass of an expected assignment, waiting for each parameter's part of the
    update.

    Args:
        session: receives the update.
        times: of the step that begins here.
        first_batch: returns the first batch of a number of samples, as a range of positions.
        after: id of the assignment that was answered just before.
        seeds: seeds of the pass's random numbers, besides the job's seed.

    Returns:
        The pass; None if a message other than the update arrives first. Then the pass is undone.

    Raises:
        DistrustedError: the pass may have used old values; it is undone.
        Refused, UnreachableError: from the session.
    """
    replica = session.replica
    if any(map(_compiled, replica.model.modules())):
        raise DistrustedError("the model is compiled")
    before, undone, failure = computation.snapshot(), replica.undone, list[BaseException]()

    def needed(index: int) -> None:
        times.used(index)
        try:
            if not failure and session.take_in(index, expected.version, POLL_S):
                times.waited()
                return
            failure.append(Stopped())
        except Exception as error:
            failure.append(error)
        raise Stopped

    def undo() -> None:
        before.restore()
        replica.check()

    indices, frames = computation.indices(expected), _compiled_frames()
    indices = indices[first_batch(len(indices))]
    watch = _Watch(replica.parameters, needed)
    times.begin()
    try:
        with watch:
            loss = computation.forward(indices, seeds)
        times.forward()
        if failure:  # the task's code has caught the exception that stopped it
            raise Stopped
        if _compiled_frames() != frames:
            raise DistrustedError("part of the model is compiled")
        if replica.check():
            raise DistrustedError("the task points parameters' data elsewhere while they are updated")
        for unseen in watch.unseen.values():  # may have been used through an alias, or on another thread
            needed(unseen)
            if replica.has_moved(unseen):
                raise DistrustedError("the task may use parameters in a way that cannot be observed")
    except Stopped:
        undo()
        if isinstance(failure[0], Stopped):
            return None
        raise failure[0] from None
    except TaskFailedError as error:  # if the early start is not the cause, the next pass will fail too
        undo()
        raise DistrustedError(str(error)) from None
    except DistrustedError:
        undo()
        raise
    return Early(expected, after, undone, before.restore, loss=loss)


def _compiled(module: nn.Module) -> bool:
    """True if torch.compile was applied to the module."""
    in_place: Any = getattr(module, "_compiled_call_impl", None)
    return type(module).__name__ == "OptimizedModule" or in_place is not None


def _compiled_frames() -> int:
    """Return how many functions torch.compile has looked at in this process; does not import it."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    return int(utils.counters["frames"]["total"]) if utils is not None else 0
