"""Configuration of the commands: flag > environment `GC_*` > TOML file (`--config`) > default.

A command's options are one frozen dataclass whose fields are made with `option`. `resolve` fills it and
remembers where each value came from, so that `--print-config` can say so. Nothing here imports torch or
grpc: `--help` answers at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import tomllib
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

T = TypeVar("T")

# Shared by every daemon.
LOG_FORMATS = ("auto", "text", "json")
DEFAULT_HTTP_PORT = 9464


class UsageError(ValueError):
    """A command line, environment variable or file that a person has to correct."""


@dataclass(frozen=True, slots=True)
class _Option:
    help: str
    metavar: str | None
    choices: tuple[str, ...] | None
    check: Callable[[Any], str | None] | None


def option(
    default: Any = dataclasses.MISSING,
    help: str = "",
    *,
    metavar: str | None = None,
    choices: Sequence[str] | None = None,
    check: Callable[[Any], str | None] | None = None,
) -> Any:
    """A dataclass field that is an option.

    Args:
        default: without one the option is required.
        check: returns what would be accepted ("at least 1"), or None when the value is fine; or raises
            ValueError that says everything.
    """
    info = _Option(help, metavar, tuple(choices) if choices else None, check)
    return dataclasses.field(default=default, metadata={"option": info})


def at_least(minimum: float) -> Callable[[float], str | None]:
    """A check for numbers."""
    return lambda value: None if value >= minimum else f"at least {minimum:g}"


def between(minimum: int, maximum: int) -> Callable[[int], str | None]:
    """A check for whole numbers that travel in a field of limited size."""
    return lambda value: None if minimum <= value <= maximum else f"{minimum} to {maximum}"


def port_number(value: int) -> str | None:
    """A check for TCP ports, 0 included."""
    return None if 0 <= value <= 65535 else "a port from 0 to 65535"


@dataclass(frozen=True, slots=True)
class Effective(Generic[T]):
    """A resolved configuration and where each value came from, by field name."""

    config: T
    origins: Mapping[str, str]

    def describe(self) -> str:
        rows = [(name, getattr(self.config, name), origin) for name, origin in self.origins.items()]
        width = max(len(name) for name, _, _ in rows)
        return "\n".join(f"{name:<{width}} = {value!r}  # {origin}" for name, value, origin in rows)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def resolve(
    cls: type[T],
    *,
    prog: str,
    description: str,
    argv: Sequence[str],
    environ: Mapping[str, str],
    version: str,
) -> Effective[T]:
    """Fill `cls` from the command line, the environment and the file.

    The file's table is the last word of `prog`: gc-server reads `[server]`.

    Raises:
        UsageError: names the option, what was got, what is accepted and where it came from.
        SystemExit: after --help, --version or --print-config.
    """
    fields = {field.name: field for field in dataclasses.fields(cls) if "option" in field.metadata}  # type: ignore[arg-type]
    kinds: dict[str, type[Any]] = typing.get_type_hints(cls)
    parser = _Parser(
        prog=prog,
        description=description,
        allow_abbrev=False,
        epilog=f"Every option may also be set as GC_<OPTION> in the environment or in the "
        f"[{prog.removeprefix('gc-')}] table of the --config file.",
    )
    parser.add_argument("--version", action="version", version=f"{prog} {version}")
    parser.add_argument("--config", metavar="FILE", help="TOML file with options")
    parser.add_argument(
        "--print-config", action="store_true", help="print every option with where it came from, and exit"
    )
    for name, field in fields.items():
        info: _Option = field.metadata["option"]
        text = info.help.replace("%", "%%")
        if (
            field.default is not dataclasses.MISSING
            and field.default not in ("", None)
            and kinds[name] is not bool
        ):
            text += f" (default: {field.default})"
        if kinds[name] is bool:
            parser.add_argument(_flag(name), action=argparse.BooleanOptionalAction, default=None, help=text)
        else:
            metavar = info.metavar or (
                "|".join(info.choices) if info.choices else kinds[name].__name__.upper()
            )
            parser.add_argument(_flag(name), default=None, metavar=metavar, help=text)
    given = vars(parser.parse_args(list(argv)))
    file_values = _read_file(given.pop("config") or environ.get("GC_CONFIG"), prog, fields)
    print_config = given.pop("print_config")

    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for name, field in fields.items():
        variable = f"GC_{name.upper()}"
        if given[name] is not None:
            raw, origin = given[name], "flag"
        elif variable in environ:
            raw, origin = environ[variable], f"environment {variable}"
        elif name in file_values:
            raw, origin = file_values[name], "file"
        elif field.default is not dataclasses.MISSING:
            values[name], origins[name] = field.default, "default"
            continue
        else:
            raise UsageError(f"{_flag(name)} is required (or set {variable}; see {prog} --help)")
        values[name] = _convert(name, kinds[name], raw, origin, field.metadata["option"])
        origins[name] = origin
    effective = Effective(cls(**values), origins)
    if print_config:
        print(effective.describe())
        raise SystemExit(0)
    return effective


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _read_file(path: str | None, prog: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        content = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path}: not TOML: {error}") from None
    section = prog.removeprefix("gc-")
    table = content.get(section, {})
    if not isinstance(table, dict):
        raise UsageError(f"--config {path}: {section!r} must be a table, [{section}]")
    values = {key.replace("-", "_"): value for key, value in typing.cast("dict[str, Any]", table).items()}
    unknown = sorted(set(values) - set(fields))
    if unknown:
        known = ", ".join(sorted(fields))
        raise UsageError(f"--config {path}: unknown key {unknown[0]!r} in [{section}]; known: {known}")
    return values


def _convert(name: str, kind: type[Any], raw: Any, origin: str, info: _Option) -> Any:
    def wrong(expected: str) -> UsageError:
        return UsageError(f"{_flag(name)} ({origin}): expected {expected}, got {raw!r}")

    value: Any
    if kind is bool:
        words = {"1": True, "true": True, "yes": True, "on": True}
        words |= {"0": False, "false": False, "no": False, "off": False}
        if isinstance(raw, bool):
            value = raw
        elif str(raw).lower() in words:
            value = words[str(raw).lower()]
        else:
            raise wrong("true or false")
    elif kind in (int, float):
        if isinstance(raw, bool):
            raise wrong("a number")
        try:
            value = kind(raw) if isinstance(raw, str) or kind is float or isinstance(raw, int) else None
        except (TypeError, ValueError):
            value = None
        if value is None or (isinstance(value, float) and not math.isfinite(value)):
            raise wrong("a whole number" if kind is int else "a finite number")
    else:
        if isinstance(raw, bool) or not isinstance(raw, str | int | float):
            raise wrong("text")
        value = kind(raw)
    if info.choices and value not in info.choices:
        raise wrong(f"one of {', '.join(info.choices)}")
    try:
        accepted = info.check(value) if info.check else None
    except ValueError as error:
        raise UsageError(f"{_flag(name)} ({origin}): {error}") from None
    if accepted is not None:
        raise wrong(accepted)
    return value
