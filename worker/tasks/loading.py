"""Make a task from the spec that names it: `digits:model=cnn` or `my_tasks:spirals:points=500`.

The options after the last colon become keyword arguments of the function that makes the task, converted by
its annotations. A task's options are its function's parameters, and need no second description. The function
is a built-in one, one that another distribution declares as an entry point of the group `gradwire.tasks`, or
one of a module that the spec names.
"""

from __future__ import annotations

import contextlib
import inspect
import traceback
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...common import plugins
from ...common.configuration import UsageError
from ...common.spec import Spec, SpecError, did_you_mean, known, parse_switch
from ...settings import BUILT_IN_TASKS, parse_task
from .task import Task, TaskError, TaskSpecError

# Exceptions of a task's code. SystemExit too: a script that is not a task must not end the worker silently.
_RAISED = (Exception, SystemExit)


def load(spec: str) -> Task:
    """Make the task that `spec` names.

    Args:
        spec: `name[:key=value,...]` for a task that is built in or declared by an installed distribution,
            `module:function[:key=value,...]` for a function that returns a `Task`. The working directory is
            searched for the module first.

    Raises:
        TaskSpecError: there is no such task, or it does not accept these options. The message lists the known
            ones.
        TaskError: the task raised an exception while loading, or its function returned no usable `Task`.

    Example:
        >>> gradwire.load_task("digits:model=mlp").train_samples
        1408
    """
    named = _parse(spec)
    return _make(spec, _find(spec, named.name), named)


def check_task(spec: str) -> None:
    """Import the function that `spec` names and check its options, without making the task.

    Raises:
        TaskSpecError, TaskError: as for `load`.
    """
    named = _parse(spec)
    _arguments(spec, _find(spec, named.name), named.options)


def load_allowed(spec: str, *, own: str, allowed: Sequence[str]) -> Task:
    """Make the task that the server names, if this worker's options allow it.

    A server, or an attacker that imitates one, must not choose among all functions that Python can import.
    Nor must it choose the files that a task reads, because gradients reveal their content.

    Args:
        spec: from the server.
        own: `--task`: the only task that this worker trains; empty for none.
        allowed: `--allow-task`: modules whose functions, and distributions' tasks that the server may name,
            besides the built-in ones.

    Raises:
        UsageError: the options do not allow this task. No module was imported, or only one that they allow.
        TaskSpecError, TaskError: as for `load`.
    """
    named = _parse(spec)
    if own:
        if _parse(own) != named:
            raise UsageError(
                f"the job's task is {spec!r}, but this worker was started with --task {own}; "
                "start server and worker with the same --task"
            )
        return load(spec)
    home, colon, name = named.name.partition(":")
    if home not in allowed and (colon or home not in BUILT_IN_TASKS):
        raise UsageError(
            f"the server's task is {spec!r}, which this worker may not run; if you trust the server, start "
            f"the worker with --allow-task {home}, or with --task {spec}"
        )
    function = _find(spec, named.name)
    trusted = f"if you trust the server, start the worker with --task {spec}"
    if not colon:
        for key, value in _arguments(spec, function, named.options).items():
            if isinstance(value, Path):
                raise UsageError(
                    f"the server's task {spec!r} names a file to read as {key}, which this worker does not "
                    f"allow; {trusted}"
                )
    elif (defined := getattr(function, "__module__", None)) != home:  # as by `from subprocess import run`
        raise UsageError(
            f"the server's task is {spec!r}, but {name} is not defined in {home} but in {defined}; {trusted}"
        )
    return _make(spec, function, named)


def _make(spec: str, function: Callable[..., object], named: Spec) -> Task:
    """Call the task's function with its options; raise TaskError if that fails."""
    arguments = _arguments(spec, function, named.options)
    try:
        task = function(**arguments)
    except TaskError:
        raise
    except _RAISED as error:
        raise TaskError(f"task {spec!r} raised while loading: {_describe(error)}") from error
    if not isinstance(task, Task):
        name, kind = named.name.rpartition(":")[2], type(task).__name__
        raise TaskError(f"task {spec!r}: {name} must return a gradwire.Task, got a {kind}")
    return task


def _parse(spec: str) -> Spec:
    try:
        return parse_task(spec)
    except SpecError as error:
        raise TaskSpecError(str(error)) from None


def _find(spec: str, name: str) -> Callable[..., object]:
    """Import the function of a task, `name` or `module:name`; raise TaskSpecError or TaskError."""
    module, colon, attribute = name.partition(":")
    if colon:
        function = _imported(spec, module, attribute)
    elif name in BUILT_IN_TASKS:
        function = _imported(spec, f"{__package__}.{name}", name)
    else:
        function = _offered(spec, name)
    if not callable(function):
        raise TaskSpecError(
            f"task {spec!r}: {attribute or name} must be a function, but is a {type(function).__name__}"
        )
    return function


def _offered(spec: str, name: str) -> object:
    point = plugins.find("task", name)
    assert point is not None, "`parse_task` has found it"
    try:
        return point.load()
    except _RAISED as error:
        raise TaskError(
            f"task {spec!r}: loading {point.value} of {plugins.giver(point)} raised {_describe(error)}"
        ) from error


def _imported(spec: str, module: str, name: str) -> object:
    try:
        return plugins.imported(module, name)
    except SpecError as error:
        raise TaskSpecError(f"task {spec!r}: {error}") from None
    except _RAISED as error:
        raise TaskError(f"task {spec!r}: importing {module} raised {_describe(error)}") from error


def _arguments(spec: str, function: Callable[..., object], options: Mapping[str, str]) -> dict[str, Any]:
    """Return the function's keyword arguments, converted by its annotations; raise TaskSpecError."""
    signature = _signature(spec, function)
    parameters = {
        name: parameter
        for name, parameter in signature.parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    listing = f"known options: {known(parameters)}"
    arguments: dict[str, Any] = {}
    for key, text in options.items():
        if key not in parameters and not takes_any:
            nearest = did_you_mean(key, parameters)
            raise TaskSpecError(f"task {spec!r}: unknown option {key!r}{nearest}; {listing}")
        hint = parameters[key].annotation if key in parameters else str
        try:
            arguments[key] = _convert(hint, text)
        except ValueError as error:
            raise TaskSpecError(f"task {spec!r}: option {key}: {error}") from None
    required = [name for name, p in parameters.items() if p.default is p.empty and name not in options]
    if required:
        raise TaskSpecError(f"task {spec!r}: option {required[0]!r} is required; {listing}")
    return arguments


def _signature(spec: str, function: Callable[..., object]) -> inspect.Signature:
    """Return the signature, with evaluated annotations if possible; raise TaskSpecError."""
    with contextlib.suppress(*_RAISED):  # an annotation may be wrong, or imported for type checkers only
        return inspect.signature(function, eval_str=True)
    try:
        return inspect.signature(function)
    except _RAISED as error:
        raise TaskSpecError(
            f"task {spec!r}: its parameters cannot be read ({error}); name a function that returns a Task"
        ) from None


def _convert(hint: Any, text: str) -> Any:
    """Convert to the annotated type: str, int, float, bool (on, off), Path or Literal; others stay text."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):  # X | None counts as X
        hint = next(member for member in typing.get_args(hint) if member is not types.NoneType)
    if typing.get_origin(hint) is typing.Literal:
        choices = {str(choice): choice for choice in typing.get_args(hint)}
    elif hint is bool:
        return parse_switch(text)
    elif hint is Path:
        return Path(text)
    elif hint is int or hint is float:
        try:
            return hint(text)
        except ValueError:
            raise ValueError(f"expected {hint.__name__}, got {text!r}") from None
    else:
        return text
    if text not in choices:
        raise ValueError(f"expected one of {', '.join(choices)}, got {text!r}")
    return choices[text]


def _describe(error: BaseException) -> str:
    """Return the exception in words, with the file and line that raised it: its traceback is not shown."""
    frames = traceback.extract_tb(error.__traceback__)
    line = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{line}"
