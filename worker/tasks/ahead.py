"""A forward pass that is begun before its assignment has come, while the update before it still comes.

The server says which samples are likely to follow (`Assignment.next`). With `--overlap both` parts of the
next version come one by one, and each operation of the forward pass waits for those that its parameters lie
in: the pass runs in a mode of torch that sees the arguments of every call. That finds a parameter wherever it
is used, also outside of the module that owns it; what is compiled or runs on another thread it does not see.
Then the pass is not trusted.

A pass that nobody asks for in the end is thrown away, with what it has left in the model's buffers and in
torch's random numbers. So no bit depends on any of this.
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
from .computation import Computation, Kept, TaskFailedError
from .sharding import Indices

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
    """Ends a forward pass that has become of no use. No exception that a task might handle."""


class _Watch(TorchFunctionMode):
    """Calls `needed` with the place of a parameter before it is used for the first time."""

    def __init__(self, parameters: Sequence[torch.Tensor], needed: Callable[[int], None]) -> None:
        super().__init__()
        self.unseen = {id(parameter): place for place, parameter in enumerate(parameters)}
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
                place = self.unseen.get(id(value))
                if place is not None:
                    self._needed(place)
                    del self.unseen[id(value)]
            elif isinstance(value, list | tuple):
                self._look(value)  # pyright: ignore[reportUnknownArgumentType]
            elif isinstance(value, dict):
                self._look(value.values())  # pyright: ignore[reportUnknownArgumentType]


def _name(function: Any) -> str:
    """Of an attribute, where that is read or set."""
    name: str = getattr(function, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        name = getattr(getattr(function, "__self__", None), "__name__", "")
    return name


@dataclass(frozen=True, slots=True, eq=False)
class Ahead:
    """A forward pass. assignment: that is expected. undone: of the replica, when it was begun."""

    assignment: m.Assignment
    indices: Indices
    loss: torch.Tensor
    kept: Kept
    undone: int

    def fits(self, session: Session, assignment: m.Assignment) -> bool:
        """Whether it is what an assignment asks for."""
        return (
            session.is_new(assignment)
            and session.replica.undone == self.undone
            and as_expected(assignment, self.assignment)
        )


def expected_after(assignment: m.Assignment) -> m.Assignment:
    """What follows if nothing happens."""
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
    session: Session, computation: Computation, times: StepTimes, expected: m.Assignment, *place: int
) -> Ahead | None:
    """Run the forward pass of an assignment that is expected, as far as nothing else comes first.

    times: of the step that begins here. place: what random numbers depend on, as in `Computation.loss`.

    Raises:
        DistrustedError: it may be wrong; nothing is left of it.
        Refused, UnreachableError: from the session.
    """
    replica = session.replica
    if any(map(_compiled, replica.model.modules())):
        raise DistrustedError("the model is compiled")
    kept, undone, failure = computation.keep(), replica.undone, list[BaseException]()

    def needed(place: int) -> None:
        times.used(place)
        try:
            if not failure and session.take_in(place, expected.version, POLL_S):
                times.waited()
                return
            failure.append(Stopped())
        except Exception as error:
            failure.append(error)
        raise Stopped

    indices, frames = computation.indices(expected), _frames_compiled()
    watch = _Watch(replica.parameters, needed)
    times.begin()
    try:
        with watch:
            loss = computation.forward(indices, *place)
        times.forward()
        if failure:  # the task has taken it for something else
            raise Stopped
        if _frames_compiled() != frames:
            raise DistrustedError("some of it is compiled")
        for unseen in watch.unseen.values():  # perhaps used by another name, or on another thread
            needed(unseen)
            if replica.has_moved(unseen):
                raise DistrustedError("it may use parameters out of sight")
    except Stopped:
        kept.put_back()
        if isinstance(failure[0], Stopped):
            return None
        raise failure[0] from None
    except TaskFailedError as error:  # if that is no consequence, the next pass will fail, too
        kept.put_back()
        raise DistrustedError(str(error)) from None
    except DistrustedError:
        kept.put_back()
        raise
    return Ahead(expected, indices, loss, kept, undone)


def _compiled(module: nn.Module) -> bool:
    in_place: Any = getattr(module, "_compiled_call_impl", None)
    return type(module).__name__ == "OptimizedModule" or in_place is not None


def _frames_compiled() -> int:
    """How often torch.compile has looked at a function in this process. Importing it takes long."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    return int(utils.counters["frames"]["total"]) if utils is not None else 0
