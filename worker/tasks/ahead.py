"""A forward pass that is begun before its assignment has come, while the update before it still comes.

The server says which samples are likely to follow (`Assignment.next`). With `--overlap both` parts of the
next version come one by one, and each operation of the forward pass waits for those that its parameters lie
in: the pass runs in a mode of torch that sees the arguments of every call. That finds a parameter wherever it
is used. Hooks before each module's forward would miss a parent that uses a child's weight, a penalty on all
parameters, and copies of them, which autograd does not follow.

The mode does not see compiled code and other threads. So early passes end for the job if torch.compile has
looked at a frame, if the loss reaches a parameter that was not seen, or if autograd finds that a tensor it
had saved was changed.

Backward waits for the assignment. If that is another than was expected, the pass is thrown away, with what it
has left in the model's buffers and in torch's random numbers. So no bit depends on any of this.
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

# Attributes and methods of a tensor that say nothing of its values. Whatever is not here waits for them.
_ABOUT = frozenset(
    {"shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad", "is_leaf", "is_cuda"}
    | {"size", "dim", "numel", "nelement", "is_floating_point", "is_complex", "stride", "is_contiguous"}
    | {"__hash__", "__len__", "element_size", "get_device"}
)


class DistrustedError(Exception):
    """A forward pass may have used a parameter that it did not wait for. The message says why."""


class Stopped(BaseException):
    """Ends a forward pass that is not needed any more. A BaseException, so that no task handles it."""


class _Watch(TorchFunctionMode):
    """Calls `needed` with the index of a parameter before it is used for the first time."""

    def __init__(self, parameters: Sequence[torch.Tensor], needed: Callable[[int], None]) -> None:
        super().__init__()
        self.unseen = {id(parameter): index for index, parameter in enumerate(parameters)}
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

    Attributes:
        expected: the assignment that it serves.
        after: number of the assignment before it, which was answered.
        undone: the replica's `undone` when it was begun.
        undo: puts back what it has changed: buffers, random numbers, an optimizer.
        loss: of a forward pass; None for a round.
        step: a round; None for a forward pass.
    """

    expected: m.Assignment
    after: int
    undone: int
    undo: Callable[[], None]
    loss: torch.Tensor | None = None
    step: LocalStep | None = None

    @property
    def passed(self) -> torch.Tensor:
        """The loss of a forward pass, for backward."""
        assert self.loss is not None
        return self.loss

    def fits(self, session: Session, assignment: m.Assignment) -> bool:
        """Return whether an assignment is the expected one."""
        return (
            session.is_new(assignment)
            and session.replica.undone == self.undone
            and as_expected(assignment, self.expected)
        )


def expected_after(assignment: m.Assignment) -> m.Assignment:
    """Return the assignment that follows if nothing happens."""
    return replace(assignment, version=assignment.version + 1, ranges=assignment.next, next=())


def as_expected(assignment: m.Assignment, expected: m.Assignment) -> bool:
    """Whether an assignment asks for what was expected, and for nothing else before that."""
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
    *,
    after: int,
    seeds: Sequence[int],
) -> Early | None:
    """Run the forward pass of an assignment that is expected, as far as nothing else comes first.

    Args:
        times: of the step that begins here.
        expected: the assignment.
        after: number of the one before it.
        seeds: see `Computation.forward`.

    Returns:
        The pass; None if something else comes first.

    Raises:
        DistrustedError: it may be wrong; nothing is left of it.
        Refused, UnreachableError: from the session.
    """
    replica = session.replica
    if any(map(_compiled, replica.model.modules())):
        raise DistrustedError("the model is compiled")
    kept, undone, failure = computation.keep(), replica.undone, list[BaseException]()

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
        kept.put_back()
        replica.check()

    indices, frames = computation.indices(expected), _frames_compiled()
    watch = _Watch(replica.parameters, needed)
    times.begin()
    try:
        with watch:
            loss = computation.forward(indices, seeds)
        times.forward()
        if failure:  # the task has handled it
            raise Stopped
        if _frames_compiled() != frames:
            raise DistrustedError("some of it is compiled")
        if replica.check():
            raise DistrustedError("the task points parameters' data elsewhere while they are updated")
        for unseen in watch.unseen.values():  # perhaps used by another name, or on another thread
            needed(unseen)
            if replica.has_moved(unseen):
                raise DistrustedError("it may use parameters out of sight")
    except Stopped:
        undo()
        if isinstance(failure[0], Stopped):
            return None
        raise failure[0] from None
    except TaskFailedError as error:  # if that is no consequence, the next pass will fail, too
        undo()
        raise DistrustedError(str(error)) from None
    except DistrustedError:
        undo()
        raise
    return Early(expected, after, undone, kept.put_back, loss=loss)


def _compiled(module: nn.Module) -> bool:
    in_place: Any = getattr(module, "_compiled_call_impl", None)
    return type(module).__name__ == "OptimizedModule" or in_place is not None


def _frames_compiled() -> int:
    """Return how often torch.compile has looked at a function in this process, without importing it."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    return int(utils.counters["frames"]["total"]) if utils is not None else 0
