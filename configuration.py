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
from typing import Any, Generic, Literal, NoReturn, TypeVar, cast

from .spec import SpecError, did_you_mean, parse_spec, unknown

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
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


class UsageError(ValueError):
    """A command line, environment variable or file that a person has to correct."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One option, as it was declared.

    Attributes:
        name: of the field; `batch_size` is `--batch-size`, `GC_BATCH_SIZE` and `batch-size` in a file.
        kind: bool, int, float or str.
        default: `REQUIRED` where there is none.
        choices: the only values accepted, if not empty.
        parse: raises ValueError for text that is not accepted.
    """

    name: str
    kind: type[Any]
    default: Any
    help: str
    group: str
    unit: str
    least: float | None
    most: float | None
    metavar: str
    choices: tuple[str, ...]
    parse: Parse | None

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return f"GC_{self.name.upper()}"

    @property
    def bounds(self) -> str:
        """What numbers are accepted, in words; empty if all are."""
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

    def convert(self, raw: Any, name: str, parse: Parse | None = None) -> Any:
        """The value that text, or a value of a TOML file, stands for.

        Raises:
            ValueError: begins with `name`, and says what is accepted and what was got.
        """

        def wrong(expected: str) -> ValueError:
            return ValueError(f"{name}: expected {expected}, got {raw!r}")

        value = _number_or_text(self.kind, raw)
        if value is None:
            words = {bool: "true or false", int: "a whole number", float: "a finite number", str: "text"}
            raise wrong(words[self.kind])
        if self.choices and value not in self.choices:
            raise wrong(f"one of {', '.join(self.choices)}{did_you_mean(str(value), self.choices)}")
        low, high = self.least, self.most
        if (low is not None and value < low) or (high is not None and value > high):
            raise wrong(self.bounds)
        for check in (self.parse, parse):
            try:
                if check is not None:
                    check(value)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        return value


def option(
    default: Any,
    help: str,
    *,
    group: str = "",
    unit: str = "",
    least: float | None = None,
    most: float | None = None,
    metavar: str = "",
    parse: Parse | None = None,
) -> Any:
    """A dataclass field that is an option, of the type that it is annotated with: bool, int, float, str or a
    Literal of text.

    Args:
        default: `REQUIRED` for none.
        help: begins with a noun; unit, bounds and default are added to it.
        least, most: bounds of a number, both included.
        parse: raises ValueError that says everything about text that is not accepted.
    """
    said = {"help": help, "group": group, "unit": unit, "least": least, "most": most}
    return field(default=default, metadata={"option": {**said, "metavar": metavar, "parse": parse}})


def options_of(cls: type[Any]) -> dict[str, Option]:
    """The options of a dataclass by name, in the order of the fields."""
    hints = typing.get_type_hints(cls)
    found: dict[str, Option] = {}
    for each in dataclasses.fields(cls):
        if "option" in each.metadata:
            hint = hints[each.name]
            choices = typing.get_args(hint) if typing.get_origin(hint) is Literal else ()
            found[each.name] = Option(
                name=each.name,
                kind=str if choices else hint,
                default=each.default,
                choices=choices,
                **each.metadata["option"],
            )
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Effective(Generic[T]):
    """What a command was told.

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """One command of the package.

    Attributes:
        name: such as gc-server; its table in a file is the last word, [server].
        description: for --help.
    """

    name: str
    description: str

    @property
    def table(self) -> str:
        return self.name.removeprefix("gc-")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def read(
    cls: type[T],
    commands: Mapping[type[Any], Command],
    *,
    argv: Sequence[str],
    environ: Mapping[str, str],
    version: str,
    parsers: Mapping[str, Parse] | None = None,
    epilog: str = "",
) -> Effective[T]:
    """Fill the dataclass of a command from the command line, the environment and the file.

    Args:
        commands: all of them, by dataclass: what is set for another command is no mistake.
        parsers: by option, checks that the declaration cannot name because they live in a room.
        epilog: text for the end of --help.

    Raises:
        UsageError: names the option, what was got, what is accepted and where it came from.
        SystemExit: after --help or --version.
    """
    options = options_of(cls)
    given = _parse_flags(commands[cls], options, argv, version, epilog)
    print_config = given.pop("print_config")
    _check_variables(environ, commands)
    file = _read_file(given.pop("config") or environ.get("GC_CONFIG"), cls, commands)

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
            raise UsageError(
                f"{each.flag} is required (or set {each.variable}; see {commands[cls].name} --help)"
            )
        try:
            values[name] = each.convert(raw, f"{each.flag} ({origin})", (parsers or {}).get(name))
        except ValueError as error:
            raise UsageError(str(error)) from None
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
    options = options_of(cls)
    values = {name: each.convert(texts[name], name) for name, each in options.items() if name in texts}
    return cls(**values, **more)


def parse_named(kind: str, text: str, classes: Mapping[str, type[T]]) -> T:
    """The options of what `name[:key=value,...]` names, where each class declares its keys with `option`.

    Raises:
        SpecError: names what is wrong, and lists what is known.
    """
    spec = parse_spec(kind, text)
    if spec.name not in classes:
        raise SpecError(unknown(kind, spec.name, classes))
    cls = classes[spec.name]
    options = options_of(cls)
    values: dict[str, Any] = {}
    for key, given in spec.options.items():
        if key not in options:
            raise SpecError(f"{kind} {spec.name!r}: {unknown('key', key, options)}")
        try:
            values[key] = options[key].convert(given, key)
        except ValueError as error:
            raise SpecError(f"{kind} {spec.name!r}: {error}") from None
    try:
        return cls(**values)
    except ValueError as error:
        raise SpecError(f"{kind} {spec.name!r}: {error}") from None


def _parse_flags(
    me: Command, options: Mapping[str, Option], argv: Sequence[str], version: str, epilog: str
) -> dict[str, Any]:
    """What was given on the command line, by name, `config` and `print_config` among them."""
    parser = _Parser(
        prog=me.name,
        description=me.description,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Every option can also be set as GC_<OPTION> in the environment, or in the "
        f"[{me.table}] table\nof the --config file.\n{epilog}",
    )
    parser.add_argument("--version", action="version", version=f"{me.name} {version}")
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
            metavar = each.metavar or "|".join(each.choices) or each.unit.upper() or kind
            how = {"metavar": metavar}
        group.add_argument(each.flag, default=argparse.SUPPRESS, help=text.replace("%", "%%"), **how)
    found, unknown = parser.parse_known_args(list(argv))
    if unknown:
        flag = unknown[0].partition("=")[0]
        flags = [each.flag for each in options.values()]
        parser.error(f"unknown argument {unknown[0]!r}{did_you_mean(flag, flags)}")
    return vars(found)


def _is_link(name: str, value: str) -> bool:
    return bool(_LINK_NAME.search(name) or _LINK_VALUE.match(value))


def _check_variables(environ: Mapping[str, str], commands: Mapping[type[Any], Command]) -> None:
    """Raise UsageError for a `GC_` variable that is no option of any command."""
    known = {"GC_CONFIG", *(each.variable for cls in commands for each in options_of(cls).values())}
    for name, value in sorted(environ.items()):
        if name.startswith("GC_") and name not in known and not _is_link(name, value):
            raise UsageError(
                f"environment {name}: no command has such an option{did_you_mean(name, known)}; unset it"
            )


def _read_file(path: str | None, cls: type[Any], commands: Mapping[type[Any], Command]) -> dict[str, Any]:
    """The command's table, with underscores in its keys; those of other commands are checked too."""
    if path is None:
        return {}
    try:
        content = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path}: not TOML: {error}") from None
    tables = {command.table: each for each, command in commands.items()}
    found: dict[str, Any] = {}
    for name, table in content.items():
        if name not in tables:
            known = ", ".join(f"[{table}]" for table in sorted(tables))
            raise UsageError(
                f"--config {path}: unknown table [{name}]{did_you_mean(name, tables)}; known tables: {known}"
            )
        if not isinstance(table, dict):
            raise UsageError(f"--config {path}: {name!r} must be a table, [{name}]")
        theirs = options_of(tables[name])
        values = {key.replace("-", "_"): value for key, value in cast("dict[str, Any]", table).items()}
        for key in values:
            if key not in theirs:
                raise UsageError(
                    f"--config {path}: unknown key {key!r} in [{name}]{did_you_mean(key, theirs)}; "
                    f"known keys: {', '.join(sorted(theirs))}"
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
