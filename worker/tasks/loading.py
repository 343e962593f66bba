"""From the text that names a task to the task: `digits:model=cnn` or `my_tasks:spirals:points=500`.

The options after the last colon become keyword arguments of the function that makes the task, converted by
its annotations. So a task's options are its function's parameters, and need no second description.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .task import Task, TaskError, TaskSpecError

# Name to the module of this package that holds a function of the same name.
BUILT_IN: Mapping[str, str] = {"digits": ".digits"}

_SWITCH = {"on": True, "off": False}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Spec:
    module: str  # relative for a built-in task
    function: str
    options: Mapping[str, str]


def load(spec: str) -> Task:
    """Make the task that `spec` names.

    Args:
        spec: `name[:key=value,...]` for a built-in task, `module:function[:key=value,...]` for a function
            that returns a `Task`. The working directory is searched for the module first.

    Raises:
        TaskSpecError: there is no such task, or it does not take these options. The message lists the known
            ones.
        TaskError: the task raised while loading, or what it returned is not a usable `Task`.
    """
    parsed = _parse(spec)
    function = _find(spec, parsed)
    arguments = _arguments(spec, function, parsed.options)
    try:
        task = function(**arguments)
    except TaskError:
        raise
    except Exception as error:
        raise TaskError(f"task {spec!r} raised while loading: {_describe(error)}") from error
    if not isinstance(task, Task):
        raise TaskError(
            f"task {spec!r}: {parsed.function} must return a gradwire.worker.tasks.Task, "
            f"got a {type(task).__name__}"
        )
    return task


def _parse(spec: str) -> _Spec:
    head, _, rest = spec.partition(":")
    if head in BUILT_IN:
        return _Spec(module=BUILT_IN[head], function=head, options=_parse_options(spec, rest, ":" in spec))
    function, colon, options = rest.partition(":")
    if not function.isidentifier():  # "key=value" is none either: then `head` was meant as a built-in name
        raise TaskSpecError(
            f"unknown task {spec!r}; known tasks: {', '.join(sorted(BUILT_IN))}; "
            f"your own is named module:function[:key=value,...]"
        )
    return _Spec(module=head, function=function, options=_parse_options(spec, options, bool(colon)))


def _parse_options(spec: str, text: str, present: bool) -> dict[str, str]:
    options: dict[str, str] = {}
    for item in text.split(",") if present else ():
        key, equals, value = item.partition("=")
        if not (key.isidentifier() and equals and value):
            raise TaskSpecError(f"task {spec!r}: expected key=value after the colon, got {item!r}")
        if key in options:
            raise TaskSpecError(f"task {spec!r}: the option {key!r} is given twice")
        options[key] = value
    return options


def _find(spec: str, parsed: _Spec) -> Callable[..., object]:
    here = str(Path.cwd())
    if here not in sys.path:  # a command that was installed does not have it there, `python -m` does
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(parsed.module, __package__)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and _is_or_is_above(error.name, parsed.module):
            raise TaskSpecError(
                f"task {spec!r}: there is no module {error.name!r} in {here} or among the installed packages"
                f"; run in the directory that holds it, or add that to PYTHONPATH"
            ) from None
        raise TaskError(f"task {spec!r}: importing {parsed.module} raised {_describe(error)}") from error
    function: object = getattr(module, parsed.function, None)
    if function is None:
        raise TaskSpecError(f"task {spec!r}: {module.__file__} has no {parsed.function!r}")
    if not callable(function):
        kind = type(function).__name__
        raise TaskSpecError(f"task {spec!r}: {parsed.function} must be a function, it is a {kind}")
    return function


def _is_or_is_above(missing: str | None, module: str) -> bool:
    """Whether it is the module itself that is missing, and not one that it imports."""
    return missing is not None and f"{module}.".startswith(f"{missing}.")


def _arguments(spec: str, function: Callable[..., object], options: Mapping[str, str]) -> dict[str, Any]:
    try:
        signature = inspect.signature(function, eval_str=True)
    except NameError:  # an annotation that is only imported for type checkers
        signature = inspect.signature(function)
    parameters = {
        name: parameter
        for name, parameter in signature.parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    known = ", ".join(parameters) or "none"
    arguments: dict[str, Any] = {}
    for key, text in options.items():
        if key not in parameters and not takes_any:
            raise TaskSpecError(f"task {spec!r}: unknown option {key!r}; known options: {known}")
        hint = parameters[key].annotation if key in parameters else str
        try:
            arguments[key] = _convert(hint, text)
        except ValueError as error:
            raise TaskSpecError(f"task {spec!r}: option {key}: {error}") from None
    required = [name for name, p in parameters.items() if p.default is p.empty and name not in options]
    if required:
        raise TaskSpecError(f"task {spec!r}: the option {required[0]!r} is required; known options: {known}")
    return arguments


def _convert(hint: Any, text: str) -> Any:
    """Read the text as the annotation says: a str, int, float, bool (on, off) or Literal; else leave it."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):  # X | None counts as X
        hint = next(member for member in typing.get_args(hint) if member is not types.NoneType)
    if typing.get_origin(hint) is typing.Literal:
        choices = {str(choice): choice for choice in typing.get_args(hint)}
    elif hint is bool:
        choices = _SWITCH
    elif hint in (int, float):
        try:
            return hint(text)
        except ValueError:
            raise ValueError(f"expected {hint.__name__}, got {text!r}") from None
    else:
        return text
    if text not in choices:
        raise ValueError(f"expected one of {', '.join(choices)}, got {text!r}")
    return choices[text]


def _describe(error: Exception) -> str:
    """The exception with the place it came from: its traceback is not shown to people."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"
