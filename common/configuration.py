"""Read a command's options. Order of precedence: flag, environment variable `GC_*`, TOML file (`--config`),
preset, default.

A command's options are the fields of a frozen dataclass that are made with `option`; `settings` declares
them. `read` fills one such dataclass and records where each value came from, for `--print-config`. Nothing
here imports torch or grpc, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import tomllib
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar, cast

from .spec import did_you_mean, parse_one_of
from .variables import is_link, unknown_variables
from .version import __version__

T = TypeVar("T")
Parse = Callable[[str], object]
REQUIRED: Any = dataclasses.MISSING

_LARGE = 1_000_000  # larger upper bounds are left out of the help text
_SWITCH = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}


class UsageError(ValueError):
    """A mistake in a command line, environment variable or file, which the user has to correct.

    Example:
        >>> try:
        ...     gradwire.connect(compressor="5bit")
        ... except gradwire.UsageError as error:
        ...     print(error)
        compressor '5bit': unknown compressor '5bit' (did you mean '8bit'?)...
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """The declaration of one command-line option.

    Attributes:
        default: default value; `REQUIRED` if the user must give one.
        help: help text that begins with a noun. Unit, bounds and default are appended to it.
        group: heading in --help under which the option is listed.
        unit: unit of the number, such as "seconds"; empty for none.
        least, most: bounds of a number, inclusive; None for no bound.
        metavar: placeholder for the value in --help; empty to derive one from choices, unit or kind.
        parse: function that raises ValueError, with a complete message, for text that it rejects; None to
            accept any.
        name: name of the dataclass field; `batch_size` is `--batch-size`, `GC_BATCH_SIZE` and `batch-size` in
            a file.
        kind: type of the value: bool, int, float or str.
        choices: accepted values; empty to accept any.
        sets: values of other options by name, by value of this one (a preset). They take the place of
            defaults; empty for an option that sets no other.
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
    sets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return f"GC_{self.name.upper()}"

    @property
    def bounds(self) -> str:
        """Range of accepted numbers, in words, such as "1 to 10"; empty if every number is accepted."""
        if self.least is None:
            return ""
        return f"at least {self.least}" if self.most is None else f"{self.least} to {self.most}"

    @property
    def notes(self) -> str:
        """Unit and bounds, joined for --help and the tables; an upper bound above `_LARGE` is left out."""
        bounds = f"at least {self.least}" if (self.most or 0) > _LARGE else self.bounds
        return "; ".join(filter(None, [self.unit, bounds]))

    @property
    def default_text(self) -> str:
        """Default as a user would type it; empty if the option is required."""
        if self.default is REQUIRED:
            return ""
        if self.kind is bool:
            return "on" if self.default else "off"
        return f"{self.default:g}" if self.kind is float else str(self.default)

    def convert(self, raw: Any, parse: Parse | None = None) -> Any:
        """Return the option's value for `raw`: text, or a value from a TOML file.

        Raises ValueError, which says what is accepted, and quotes the value. parse: further check.
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
    """Declare an option as a dataclass field. Its annotation is its type: bool, int, float, str or a Literal
    of text.

    The arguments are attributes of `Option`.
    """
    declared = Option(default=default, help=help, parse=parse, **more)
    return field(default=default, metadata={"option": declared})


def options_of(cls: type[Any]) -> dict[str, Option]:
    """Return the options that a dataclass declares, by field name, in the order of its fields."""
    hints = typing.get_type_hints(cls)
    found: dict[str, Option] = {}
    for each in dataclasses.fields(cls):
        if "option" in each.metadata:
            choices = typing.get_args(hints[each.name])  # empty unless the annotation is a Literal
            kind = str if choices else hints[each.name]
            declared: Option = each.metadata["option"]
            found[each.name] = dataclasses.replace(declared, name=each.name, kind=kind, choices=choices)
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Effective(Generic[T]):
    """The values of a command's options, each with its origin. `read` returns one.

    Attributes:
        settings: instance of the command's dataclass.
        origins: origin of each value, by option name: "flag", "argument", "environment GC_…", "file",
            "preset NAME", "default", or the reason that was passed to `changed`.
        print_config: True if the user gave --print-config: print the options and exit.
        foreign: warning of `GC_` variables that are no options, and may be another program's; empty for none.
    """

    settings: T
    origins: Mapping[str, str]
    print_config: bool
    foreign: str = ""

    def chosen(self, name: str) -> bool:
        """Return True if the user gave the option a value by flag, environment, file or preset."""
        return self.origins[name] != "default"

    def changed(self, why: str, **values: Any) -> Effective[T]:
        """Return a copy with options replaced by values that follow from other options. why: their origin."""
        settings = cast(T, dataclasses.replace(cast(Any, self.settings), **values))
        return dataclasses.replace(
            self, settings=settings, origins={**self.origins, **dict.fromkeys(values, why)}
        )

    def describe(self) -> str:
        """Return the lines of --print-config, `name = value  # origin`."""
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
    arguments: Mapping[str, Any] | None = None,
) -> Effective[T]:
    """Return a command's options, read from command line, environment, file, preset and defaults.

    Args:
        cls: dataclass that declares the command's options; its docstring is the description in --help.
        commands: name of every command, such as gc-server, by its dataclass. Variables and file tables of the
            other commands are accepted and ignored. The text after `gc-` is the command's table in a file.
        argv: arguments, without the name of the program.
        environ: environment variables.
        parsers: further checks by option name, for a check in a room that `settings` must not import.
        epilog: text appended to --help.
        arguments: options by name that a function was called with, in place of `argv`; None for a command.

    Raises:
        UsageError: names the option and its origin, quotes the value, and says what is accepted.
        SystemExit: after --help or --version.
    """
    options = options_of(cls)
    called = arguments is not None
    given = _parse_flags(cls, commands, options, argv, epilog) if arguments is None else {**arguments}
    print_config = given.pop("print_config", False)
    foreign = _check_variables(environ, commands)
    path = given.pop("config", None) or environ.get("GC_CONFIG")
    file = _read_file(path, cls, commands)

    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    preset: Mapping[str, Any] = {}
    preset_origin = ""
    # Options that set others come first.
    for name, each in sorted(options.items(), key=lambda item: not item[1].sets):
        if name in given:
            raw, origin = given[name], "argument" if called else "flag"
        elif each.variable in environ and not is_link(each.variable, environ[each.variable]):
            raw, origin = environ[each.variable], f"environment {each.variable}"
        elif name in file:
            raw, origin = file[name], "file"
        elif name in preset:
            raw, origin = preset[name], preset_origin
        elif each.default is not REQUIRED:
            raw, origin = each.default, "default"
        elif called:
            raise UsageError(f"{name} is required: pass it as an argument, or set {each.variable}")
        else:
            raise UsageError(f"{each.flag} is required (or set {each.variable}; see {commands[cls]} --help)")
        try:
            values[name] = each.convert(raw, (parsers or {}).get(name))
        except ValueError as error:
            where = f"file {path}" if origin == "file" else origin
            raise UsageError(f"{name if called else each.flag} ({where}): {error}") from None
        origins[name] = origin
        if each.sets:
            preset, preset_origin = each.sets.get(values[name], {}), f"{name} {values[name]}"
    return Effective(
        settings=cls(**values),
        origins={name: origins[name] for name in options},
        print_config=print_config,
        foreign=foreign,
    )


def shared(cls: type[Any], settings: Any) -> dict[str, Any]:
    """Return the values of the options that `cls` declares and `settings` has, by option name."""
    return {name: getattr(settings, name) for name in options_of(cls) if hasattr(settings, name)}


def to_text(settings: Any, cls: type[Any]) -> dict[str, str]:
    """Return the options that `cls` declares as text by name, for `from_text`."""
    return {name: str(getattr(settings, name)) for name in options_of(cls)}


def from_text(cls: type[T], texts: Mapping[str, str], **more: Any) -> T:
    """Return an instance of `cls` made from the texts that `to_text` wrote.

    Unknown names are ignored and missing options have their defaults. This lets releases of one protocol
    version understand each other.

    Raises ValueError, which begins with the option's name. more: values of the fields that are no options.
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
    """Parse `name[:key=value,...]` and return the options dataclass of that name. Its keys are declared with
    `option`.

    Raises SpecError for an unknown name or key, or a value that its option rejects.
    """

    def converters(cls: type[T]) -> dict[str, Parse]:
        return {name: each.convert for name, each in options_of(cls).items()}

    return parse_one_of(kind, text, classes, converters)


def parser_of(cls: type[Any], commands: Mapping[type[Any], str], epilog: str = "") -> argparse.ArgumentParser:
    """Make the parser of a command's flags. The arguments are those of `read`."""
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
        help="print every option with its value and origin, then exit",
    )
    groups: dict[str, Any] = {}
    for each in options_of(cls).values():
        group = groups.get(each.group) or groups.setdefault(each.group, parser.add_argument_group(each.group))
        default = f"default: {each.default_text}" if each.default_text else ""
        said = "; ".join(filter(None, [each.notes, "required" if each.default is REQUIRED else default]))
        text = each.help + (f" ({said})" if said else "")
        how: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
        if each.kind is not bool:
            kind = {int: "N", float: "X"}.get(each.kind, "TEXT")
            how = {"metavar": each.metavar or "|".join(each.choices) or each.unit.upper() or kind}
        group.add_argument(each.flag, default=argparse.SUPPRESS, help=text.replace("%", "%%"), **how)
    return parser


def _parse_flags(
    cls: type[Any],
    commands: Mapping[type[Any], str],
    options: Mapping[str, Option],
    argv: Sequence[str],
    epilog: str,
) -> dict[str, Any]:
    parser = parser_of(cls, commands, epilog)
    found, unknown = parser.parse_known_args(list(argv))
    if unknown:
        flag = unknown[0].partition("=")[0]
        flags = [each.flag for each in options.values()]
        having = [theirs for other, theirs in commands.items() if flag in _flags(other)]
        hint = f"; it is an option of {' and '.join(having)}" if having else did_you_mean(flag, flags)
        parser.error(f"unknown argument {unknown[0]!r}{hint}")
    return vars(found)


def _flags(cls: type[Any]) -> set[str]:
    """Return the flags of a command, including the `--no-…` form of each switch."""
    options = options_of(cls).values()
    undoing = {each.flag.replace("--", "--no-", 1) for each in options if each.kind is bool}
    return {each.flag for each in options} | undoing


def _table(command: str) -> str:
    return command.removeprefix("gc-")


def _check_variables(environ: Mapping[str, str], commands: Mapping[type[Any], str]) -> str:
    """Return a warning of `GC_` variables that are not options of any command; empty if there are none.

    Other programs have such variables, too: GC_PROJECT_ID, or the GC_INITIAL_HEAP_SIZE of garbage collectors.

    Raises:
        UsageError: a variable is nearly an option, so it is misspelt.
    """
    known = {"GC_CONFIG", *(each.variable for cls in commands for each in options_of(cls).values())}
    foreign: list[str] = []
    for name, meant in unknown_variables(environ, known):
        if meant:
            raise UsageError(
                f"environment {name}: no command has this option (did you mean {meant!r}?); unset it"
            )
        foreign.append(name)
    if not foreign:
        return ""
    return f"environment {', '.join(foreign)}: ignored, because no option of Gradwire has this name"


def _read_file(path: str | None, cls: type[Any], commands: Mapping[type[Any], str]) -> dict[str, Any]:
    """Return the command's table of a TOML file, with underscores in its keys; empty if `path` is None.

    The tables of other commands are checked too: unknown tables and keys raise UsageError.
    """
    if path is None:
        return {}
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path}: not TOML: {error}") from None
    tables = {_table(command): each for each, command in commands.items()}
    found: dict[str, Any] = {}
    for name, table in content.items():
        if name not in tables and not isinstance(table, dict):
            own = _table(commands[cls])
            raise UsageError(f"--config {path}: {name!r} is outside any table; put it below a line [{own}]")
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
    """Return `raw` as a finite value of `kind`, or None."""
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
