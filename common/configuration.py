"""Reads what a command was told: flag > environment `GC_*` > TOML file (`--config`) > default.

A command's options are the fields of a frozen dataclass that are made with `option`; `settings` declares
them. `read` fills one such dataclass and remembers where each value came from, for `--print-config`.
Nothing here imports torch or grpc, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
import tomllib
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar, cast

from .spec import did_you_mean, parse_one_of
from .version import __version__

T = TypeVar("T")
Parse = Callable[[str], object]
REQUIRED: Any = dataclasses.MISSING

_LARGE = 1_000_000  # bounds above it are not worth telling before somebody meets them
# Variables that Kubernetes and Docker set for a service whose name begins with gc-.
_LINK_NAME = re.compile(
    r"_SERVICE_HOST$|_SERVICE_PORT(_\w+)?$|_PORT_\d+_(TCP|UDP|SCTP)(_(PORT|PROTO|ADDR))?$"
)
_LINK_VALUE = re.compile(r"(tcp|udp|sctp)://")
_SWITCH = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}


class UsageError(ValueError):
    """A command line, environment variable or file that a person has to correct."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One option, as it was declared.

    Attributes:
        default: `REQUIRED` where there is none.
        help: begins with a noun; unit, bounds and default are added to it.
        least, most: bounds of a number, both included.
        parse: raises ValueError that says everything about text that is not accepted.
        name: of the field; `batch_size` is `--batch-size`, `GC_BATCH_SIZE` and `batch-size` in a file.
        kind: bool, int, float or str.
        choices: the only values accepted, if not empty.
    """

    default: Any
    help: str
    group: str = ""
    unit: str = ""
    least: float | None = None
    most: float | None = None
    metavar: str = ""
    parse: Parse | None = None
    name: str = ""
    kind: type[Any] = str
    choices: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return f"GC_{self.name.upper()}"

    @property
    def bounds(self) -> str:
        """The range of accepted numbers, in words; empty if all are."""
        if self.least is None:
            return ""
        return f"at least {self.least}" if self.most is None else f"{self.least} to {self.most}"

    @property
    def notes(self) -> str:
        """Unit and bounds, as far as people want to be told them."""
        bounds = f"at least {self.least}" if (self.most or 0) > _LARGE else self.bounds
        return "; ".join(filter(None, [self.unit, bounds]))

    @property
    def default_text(self) -> str:
        """The default as it would be typed; empty where there is none."""
        if self.default is REQUIRED:
            return ""
        if self.kind is bool:
            return "on" if self.default else "off"
        return f"{self.default:g}" if self.kind is float else str(self.default)

    def convert(self, raw: Any, parse: Parse | None = None) -> Any:
        """The value that text, or a value of a TOML file, stands for.

        Raises:
            ValueError: says what is accepted and what was got.
        """
        value = _number_or_text(self.kind, raw)
        low, high = self.least, self.most
        expected = ""
        if not isinstance(value, self.kind):
            words = {bool: "true or false", int: "a whole number", float: "a finite number", str: "text"}
            expected = words[self.kind]
        elif self.choices and value not in self.choices:
            expected = f"one of {', '.join(self.choices)}{did_you_mean(str(value), self.choices)}"
        elif (low is not None and value < low) or (high is not None and value > high):
            expected = self.bounds
        if expected:
            raise ValueError(f"expected {expected}, got {raw!r}")
        for check in filter(None, (self.parse, parse)):
            check(value)
        return value


def option(default: Any, help: str, *, parse: Parse | None = None, **more: Any) -> Any:
    """A dataclass field that is an option, of the type that it is annotated with: bool, int, float, str or a
    Literal of text. more: further attributes of `Option`."""
    declared = Option(default=default, help=help, parse=parse, **more)
    return field(default=default, metadata={"option": declared})


def options_of(cls: type[Any]) -> dict[str, Option]:
    """The options of a dataclass by name, in the order of the fields."""
    hints = typing.get_type_hints(cls)
    found: dict[str, Option] = {}
    for each in dataclasses.fields(cls):
        if "option" in each.metadata:
            choices = typing.get_args(hints[each.name])  # of a Literal
            kind = str if choices else hints[each.name]
            declared: Option = each.metadata["option"]
            found[each.name] = dataclasses.replace(declared, name=each.name, kind=kind, choices=choices)
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Effective(Generic[T]):
    """The options of a command.

    Attributes:
        settings: the options' values.
        origins: where each came from, by name: "flag", "environment GC_…", "file", "default".
        print_config: whether to print them instead of doing anything.
    """

    settings: T
    origins: Mapping[str, str]
    print_config: bool

    def chosen(self, name: str) -> bool:
        """Whether somebody gave the option a value."""
        return self.origins[name] != "default"

    def changed(self, why: str, **values: Any) -> Effective[T]:
        """The same with values that follow from others; `why` becomes their origin."""
        settings = cast(T, dataclasses.replace(cast(Any, self.settings), **values))
        return dataclasses.replace(
            self, settings=settings, origins={**self.origins, **dict.fromkeys(values, why)}
        )

    def describe(self) -> str:
        width = max(map(len, self.origins))
        return "\n".join(
            f"{name:<{width}} = {getattr(self.settings, name)!r}  # {origin}"
            for name, origin in self.origins.items()
        )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def read(
    cls: type[T],
    commands: Mapping[type[Any], str],
    *,
    argv: Sequence[str],
    environ: Mapping[str, str],
    parsers: Mapping[str, Parse] | None = None,
    epilog: str = "",
) -> Effective[T]:
    """Fill the dataclass of a command, whose docstring describes it, from command line, environment and file.

    Args:
        commands: the names of all of them, such as gc-server, by dataclass: what is set for another command
            is no mistake. The last word of a name is the command's table in a file.
        parsers: by option, checks that the declaration cannot name because they live in a room.
        epilog: text for the end of --help.

    Raises:
        UsageError: names the option, what was got, what is accepted and where it came from.
        SystemExit: after --help or --version.
    """
    options = options_of(cls)
    given = _parse_flags(cls, commands, options, argv, epilog)
    print_config = given.pop("print_config")
    _check_variables(environ, commands)
    path = given.pop("config") or environ.get("GC_CONFIG")
    file = _read_file(path, cls, commands)

    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for name, each in options.items():
        if name in given:
            raw, origin = given[name], "flag"
        elif each.variable in environ and not _is_link(each.variable, environ[each.variable]):
            raw, origin = environ[each.variable], f"environment {each.variable}"
        elif name in file:
            raw, origin = file[name], "file"
        elif each.default is not REQUIRED:
            raw, origin = each.default, "default"
        else:
            raise UsageError(f"{each.flag} is required (or set {each.variable}; see {commands[cls]} --help)")
        try:
            values[name] = each.convert(raw, (parsers or {}).get(name))
        except ValueError as error:
            where = f"file {path}" if origin == "file" else origin
            raise UsageError(f"{each.flag} ({where}): {error}") from None
        origins[name] = origin
    return Effective(settings=cls(**values), origins=origins, print_config=print_config)


def shared(cls: type[Any], settings: Any) -> dict[str, Any]:
    """The values of those options of `cls` that `settings` has too."""
    return {name: getattr(settings, name) for name in options_of(cls) if hasattr(settings, name)}


def to_text(settings: Any, cls: type[Any]) -> dict[str, str]:
    """The options of `cls`, which `settings` is one of, as text that `from_text` reads back the same."""
    return {name: str(getattr(settings, name)) for name in options_of(cls)}


def from_text(cls: type[T], texts: Mapping[str, str], **more: Any) -> T:
    """The options that `to_text` wrote, and fields that are none.

    A name that this release does not know is passed over, and one that is missing has its default, so that
    releases of one protocol version understand each other.

    Raises:
        ValueError: text that is not a value of its option.
    """
    values: dict[str, Any] = {}
    for name, each in options_of(cls).items():
        try:
            if name in texts:
                values[name] = each.convert(texts[name])
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return cls(**values, **more)


def parse_named(kind: str, text: str, classes: Mapping[str, type[T]]) -> T:
    """Like `parse_one_of`, for classes that declare their keys with `option`."""

    def converters(cls: type[T]) -> dict[str, Parse]:
        return {name: each.convert for name, each in options_of(cls).items()}

    return parse_one_of(kind, text, classes, converters)


def _parse_flags(
    cls: type[Any],
    commands: Mapping[type[Any], str],
    options: Mapping[str, Option],
    argv: Sequence[str],
    epilog: str,
) -> dict[str, Any]:
    """Return the options of the command line by name, with `config` and `print_config`."""
    command = commands[cls]
    parser = _Parser(
        prog=command,
        description=cls.__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Every option can also be set as GC_<OPTION> in the environment, or in the "
        f"[{_table(command)}] table\nof the --config file.\n{epilog}",
    )
    parser.add_argument("--version", action="version", version=f"{command} {__version__}")
    parser.add_argument("--config", metavar="FILE", help="TOML file with options")
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="every option with its value and where that came from, instead of a start",
    )
    groups: dict[str, Any] = {}
    for each in options.values():
        group = groups.get(each.group) or groups.setdefault(each.group, parser.add_argument_group(each.group))
        default = f"default: {each.default_text}" if each.default_text else ""
        said = "; ".join(filter(None, [each.notes, "required" if each.default is REQUIRED else default]))
        text = each.help + (f" ({said})" if said else "")
        how: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
        if each.kind is not bool:
            kind = {int: "N", float: "X"}.get(each.kind, "TEXT")
            how = {"metavar": each.metavar or "|".join(each.choices) or each.unit.upper() or kind}
        group.add_argument(each.flag, default=argparse.SUPPRESS, help=text.replace("%", "%%"), **how)
    found, unknown = parser.parse_known_args(list(argv))
    if unknown:
        flag = unknown[0].partition("=")[0]
        flags = [each.flag for each in options.values()]
        having = [theirs for other, theirs in commands.items() if flag in _flags(other)]
        hint = f"; it is an option of {' and '.join(having)}" if having else did_you_mean(flag, flags)
        parser.error(f"unknown argument {unknown[0]!r}{hint}")
    return vars(found)


def _flags(cls: type[Any]) -> set[str]:
    """Every flag of a command, those that undo a switch among them."""
    options = options_of(cls).values()
    undoing = {each.flag.replace("--", "--no-", 1) for each in options if each.kind is bool}
    return {each.flag for each in options} | undoing


def _table(command: str) -> str:
    return command.removeprefix("gc-")


def _is_link(name: str, value: str) -> bool:
    return bool(_LINK_NAME.search(name) or _LINK_VALUE.match(value))


def _check_variables(environ: Mapping[str, str], commands: Mapping[type[Any], str]) -> None:
    """Raise UsageError for a `GC_` variable that is no option of any command."""
    known = {"GC_CONFIG", *(each.variable for cls in commands for each in options_of(cls).values())}
    for name, value in sorted(environ.items()):
        if name.startswith("GC_") and name not in known and not _is_link(name, value):
            raise UsageError(
                f"environment {name}: no command has such an option{did_you_mean(name, known)}; unset it"
            )


def _read_file(path: str | None, cls: type[Any], commands: Mapping[type[Any], str]) -> dict[str, Any]:
    """The command's table, with underscores in its keys; those of other commands are checked too."""
    if path is None:
        return {}
    try:
        content = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path}: not TOML: {error}") from None
    tables = {_table(command): each for each, command in commands.items()}
    found: dict[str, Any] = {}
    for name, table in content.items():
        if name not in tables and not isinstance(table, dict):
            own = _table(commands[cls])
            raise UsageError(f"--config {path}: {name!r} is in no table; put it below a line [{own}]")
        if name not in tables:
            listed = ", ".join(f"[{table}]" for table in sorted(tables))
            raise UsageError(
                f"--config {path}: unknown table [{name}]{did_you_mean(name, tables)}; known tables: {listed}"
            )
        if not isinstance(table, dict):
            raise UsageError(f"--config {path}: {name!r} must be a table, [{name}]")
        theirs = options_of(tables[name])
        values: dict[str, Any] = {}
        for key, value in cast("dict[str, Any]", table).items():
            values[key.replace("-", "_")] = value
            if key.replace("-", "_") not in theirs:
                known = sorted(each.flag.removeprefix("--") for each in theirs.values())
                raise UsageError(
                    f"--config {path}: unknown key {key!r} in [{name}]{did_you_mean(key, known)}; "
                    f"known keys: {', '.join(known)}"
                )
        if tables[name] is cls:
            found = values
    return found


def _number_or_text(kind: type[Any], raw: Any) -> Any:
    """The value as `kind`, None if it is not one."""
    if kind is bool:
        return raw if isinstance(raw, bool) else _SWITCH.get(str(raw).lower())
    if isinstance(raw, bool) or not isinstance(raw, str | int | float):
        return None
    if kind is str:
        return str(raw)
    if kind is int and isinstance(raw, float):
        return None
    try:
        value = kind(raw)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
