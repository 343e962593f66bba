"""Find names in the documentation that the code does not have: commands, options, variables, files, metrics.

`problems` reads one page of Markdown. It looks at the whole text for `gc-` commands, `GC_` variables and
metrics, and at code (blocks and spans) for options, `make` targets, modules and files. An option counts as
known only if the command in front of it has it. The command also has to accept every complete line of a code
block that begins with it.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import io
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from gradwire.benchmarks.cli import COMMANDS as BENCHES
from gradwire.benchmarks.cli import parser_of
from gradwire.common import failpoints
from gradwire.common.configuration import UsageError, options_of, read
from gradwire.deploy.reference import PARSERS
from gradwire.server.checks import SPECS
from gradwire.server.metrics import ServerMetrics
from gradwire.settings import COMMANDS
from gradwire.worker.metrics import WorkerMetrics
from gradwire_papers.cli import parser as papers_parser

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
_MODE = tomllib.loads((ROOT / "examples" / "third_party_mode" / "pyproject.toml").read_text())["project"]
EXAMPLE_MODES = tuple(_MODE["entry-points"]["gradwire.modes"])
PAPERS = tomllib.loads((ROOT / "papers" / "pyproject.toml").read_text())["project"]
SCRIPTS = frozenset((*PROJECT["scripts"], *PAPERS["scripts"]))
EXTRAS = frozenset((*PROJECT["optional-dependencies"], *PAPERS["optional-dependencies"]))
TARGETS = frozenset(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
SETTINGS: Mapping[str, type] = {command: cls for cls, command in COMMANDS.items()}
VARIABLES = {
    "GC_CONFIG",
    *(f"GC_{field.name.upper()}" for cls in COMMANDS for field in dataclasses.fields(cls)),
}
# Options of other programs that the pages name without their program.
_SLURM = "batch chdir cpus-per-task dependency gres job-name jobid ntasks ntasks-per-node signal time"
# `--index-url` is of pip, `--now` of systemctl, `--plain` of examples/ddp_digits.py.
FOREIGN = frozenset({"--index-url", "--now", "--plain", *(f"--{name}" for name in _SLURM.split())})
# Where the code is; tests and examples have names of their own.
ROOMS = ("benchmarks", "coded", "compressors", "ddp", "deploy", "planning", "proto", "server", "worker")

_FILE = re.compile(rf"({'|'.join((*ROOMS, 'docs', 'tests', 'examples', 'papers'))})(/[\w.-]+)+")
_CODE_BLOCK = re.compile(r"^```[\s\S]*?^```|(?:^ {4,}\S.*\n)+", re.M)
_INLINE = re.compile(r"`([^`]+)`")
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


@cache
def flags_of(command: str) -> frozenset[str]:
    """Return the flags of a command, such as `gc-server` or `gc-bench step`."""
    if command in SETTINGS:
        options = options_of(SETTINGS[command]).values()
        undoing = {each.flag.replace("--", "--no-", 1) for each in options if each.kind is bool}
        common = {"--help", "--version", "--config", "--print-config"}
        return frozenset({each.flag for each in options} | undoing | common)
    if command == "gc-bench":
        return frozenset({"--help", "--version"})
    if command == "gc-paper":
        return frozenset(flag for action in papers_parser()._actions for flag in action.option_strings)  # pyright: ignore[reportPrivateUsage]
    bench = command.removeprefix("gc-bench ")
    actions = (parser_of(bench) if bench in BENCHES else PARSERS[command]())._actions  # pyright: ignore[reportPrivateUsage]
    return frozenset(flag for action in actions for flag in action.option_strings)


@cache
def every_flag() -> frozenset[str]:
    """Return the options of every command, and those that the examples declare for themselves."""
    commands = {*SETTINGS, *PARSERS, "gc-paper", *(f"gc-bench {name}" for name in BENCHES)}
    examples = {
        flag
        for path in (ROOT / "examples").rglob("*.py")
        for flag in re.findall(r'add_argument\("(--[a-z-]+)"', path.read_text())
    }
    return FOREIGN.union(examples, *map(flags_of, commands))


@cache
def metrics() -> frozenset[str]:
    """Return the names under which metrics are exported."""
    found: set[str] = set()
    for registry in (ServerMetrics("none").registry, WorkerMetrics("none").registry):
        for metric in registry.collect():
            found.add(metric.name + ("_total" if metric.type == "counter" else ""))
    return frozenset(name for name in found if name.startswith("gradwire_"))


@cache
def words() -> frozenset[str]:
    """Return every identifier that the code or the protocol has."""
    code = (path for path in sources() if path.relative_to(ROOT).parts[0] != "tests")
    text = "".join(path.read_text() for path in code if path.suffix in (".py", ".proto", ".toml"))
    return frozenset(re.findall(r"\w+", text))


@cache
def sources() -> tuple[Path, ...]:
    """Return the files and folders of the repository, without what is generated or installed."""
    hidden = (".venv", ".cache", ".git", "__pycache__", "runs", "build", "dist")
    top = [path for path in ROOT.iterdir() if path.name not in hidden and not path.is_symlink()]
    below = [path for folder in top if folder.is_dir() for path in folder.rglob("*")]
    kept = [
        path for path in (*top, *below) if not any(part in hidden for part in path.relative_to(ROOT).parts)
    ]
    return tuple(path for path in kept if path.suffix not in (".png", ".svg", ".pyc", ".nbi", ".nbc"))


@cache
def places() -> frozenset[str]:
    """Return every path of the repository, and every end of one that begins at a folder's name, with and
    without `.py`: `server/job/core.py`, `job/core`."""
    found: set[str] = set()
    for path in sources():
        parts = path.relative_to(ROOT).with_suffix("" if path.suffix == ".py" else path.suffix).parts
        found |= {"/".join(parts[first:]) for first in range(len(parts))}
    return frozenset(found | {f"{place}.py" for place in found})


def problems(page: str) -> list[str]:
    """Return one sentence for each name in a page of Markdown that the code does not have."""
    found = [f"no command {name}" for name in _commands(page) if not {name, name.removesuffix("s")} & SCRIPTS]
    found += [f"no variable {name}" for name in _variables(page) if name not in VARIABLES]
    for name in re.findall(r"\bgradwire_(?:server|worker)_[a-z_]+|\bgradwire_[a-z_]+_total", page):
        if name not in metrics() and not any(name == f"{each}_bucket" for each in metrics()):
            found.append(f"no metric {name}")
    page = re.sub(r"--script (['\"]).*?\1", "--script COMMAND", page)  # the options of a user's script
    for snippet in _snippets(page):
        found += _of_snippet(snippet)
    for line in _lines(page):
        found += _refused(line)
    return found


def unknown_names(page: str) -> list[str]:
    """Return a sentence for each module and identifier in a page's spans that the code does not have."""
    found: list[str] = []
    for text in _INLINE.findall(_CODE_BLOCK.sub("", page)):
        if re.fullmatch(r"\w+(/\w+)+(\.py)?", text) and text not in places():
            found.append(f"no module {text}")
        elif (
            re.fullmatch(r"\w+(\.\w+)*(\(\))?", text)
            and not set(re.findall(r"[A-Za-z_]\w+", text)) <= words()
        ):
            found.append(f"no name {text}")
    return found


def in_strings(source: str) -> list[str]:
    """Return one sentence for each command, option and page of docs/ that a module's strings name and that is
    not there. A module with a parser of its own may name its options."""
    own = _flags_in(source) if "add_argument" in source else frozenset[str]()
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
        flags = re.findall(r"(?<![\w-])--[a-z](?:-?[a-z]+)+(?![\w-])", text)
        found += [f"no option {flag}" for flag in flags if flag not in every_flag() | own | {"--check"}]
        found += [f"no command {name}" for name in _commands(text) if name not in SCRIPTS]
        found += [
            f"no page {name}" for name in re.findall(r"docs/[\w/.-]+\.md", text) if name not in places()
        ]
    return found


def not_installable(text: str) -> list[str]:
    """Return one sentence for each `pip install` that needs Gradwire on a package index, an extra that
    pyproject.toml does not have, or a folder that is not there."""
    found = [
        f"{name}: Gradwire is on no index" for name in re.findall(r"pip install [^\n`]*\bgradwire\b", text)
    ]
    for target in re.findall(r"pip install (?:-\S+ )*'?(\.[^\s'`]*)", text):
        folder, _, extras = target.removesuffix("]").partition("[")
        if not (ROOT / folder).is_dir():
            found.append(f"no folder {folder}")
        found += [f"no extra {extra}" for extra in extras.split(",") if extra and extra not in EXTRAS]
    return found


def _commands(text: str) -> Iterator[str]:
    yield from re.findall(r"(?<![\w/.-])gc-[a-z]+(?!\.md|[\w-])", text)


def _variables(text: str) -> Iterator[str]:
    yield from re.findall(r"\bGC_[A-Z][A-Z_]*\b", text)
    for name in re.findall(r"\bGRADWIRE_[A-Z_]+\b", text):
        if name != failpoints.VARIABLE:
            yield name


def _snippets(page: str) -> Iterator[str]:
    """Code spans, and lines of code blocks without their comments."""
    for block in _CODE_BLOCK.findall(page):
        joined = block.replace("\\\n", " ")
        yield from (re.sub(r"\s#\s.*", "", line) for line in joined.splitlines())
    for text in _INLINE.findall(_CODE_BLOCK.sub("", page)):
        yield " ".join(text.split())


def _of_snippet(snippet: str) -> Iterator[str]:
    """Check options against the command before them, and modules, targets and files."""
    known, of = every_flag(), "any command"
    words_left = snippet.split()
    while words_left:
        word = words_left.pop(0)
        if word in SCRIPTS:
            of, known = word, every_flag() if word == "gc-bench" and not words_left else flags_of(word)
            if word == "gc-bench" and words_left and re.fullmatch(r"[a-z]+", words_left[0]):
                of = f"gc-bench {words_left.pop(0)}"
                if of.removeprefix("gc-bench ") not in BENCHES:
                    yield f"no benchmark {of}"
                    return
                known = flags_of(of)
        elif word == "make" and snippet.lstrip().startswith("make ") and re.match(r"[a-z-]+$", words_left[0]):
            target = words_left.pop(0)
            if target not in TARGETS:
                yield f"no target make {target}"
                return
            of, known = f"make {target}", _flags_in(_recipe(target))
        elif word == "-m" and words_left and words_left[0].startswith("gradwire."):
            of = words_left.pop(0)
            path = ROOT / (of.removeprefix("gradwire.").replace(".", "/") + ".py")
            if not path.exists():
                yield f"no module {of}"
                return
            known = _flags_in(path.read_text())
        elif word.endswith(".py") and (ROOT / word).is_file():
            of, known = word, _flags_in((ROOT / word).read_text())
        elif word in (
            "torchrun",
            "pip",
            "docker",
            "kubectl",
            "kind",
            "git",
            "grpcurl",
            "openssl",
            "promtool",
        ):
            of, known = word, frozenset[str]()
        elif (flag := _FLAG.search(word)) and known and flag.group() not in known:
            yield f"no option {flag.group()} of {of}"
        elif _FILE.fullmatch(word) and word not in places():
            yield f"no file {word}"


def _flags_in(source: str) -> frozenset[str]:
    return frozenset(_FLAG.findall(source)) | {"--help"}


def _recipe(target: str) -> str:
    """Return the source of the programs that a target runs, or where its ARGS go to a known command."""
    recipe = re.search(rf"^{target}:.*?(?=^\S|\Z)", (ROOT / "Makefile").read_text(), re.M | re.S)
    text = recipe.group() if recipe else ""
    scripts = [ROOT / path for path in re.findall(r"\btests/[\w/]+\.py", text)]
    commands = [flag for command in re.findall(r"gc-\w+", text) for flag in flags_of(command)]
    return " ".join([*(path.read_text() for path in scripts), *commands, text])


def _lines(page: str) -> Iterator[str]:
    """Lines of code blocks that are complete calls of a command."""
    for block in _CODE_BLOCK.findall(page):
        for line in block.replace("\\\n", " ").splitlines():
            bare = re.sub(r"\s#\s.*", "", line).strip().removeprefix("sudo ")
            if bare.partition(" ")[0] in SCRIPTS and not re.search(r"\.\.\.|…|[\[\]<>|]", bare):
                yield bare


def _refused(line: str) -> Iterator[str]:
    """Have the command itself read the line, without a mode of an example, which is not installed here."""
    line = re.sub(rf" --mode ({'|'.join(EXAMPLE_MODES)})\S*", "", line)
    command, *arguments = shlex.split(line)
    if "--help" in arguments or "--version" in arguments:
        return
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            if command in SETTINGS:
                read(SETTINGS[command], COMMANDS, argv=arguments, environ={}, parsers=SPECS)
            elif command == "gc-bench":
                parser_of(arguments[0]).parse_args(arguments[1:])
            elif command == "gc-paper":
                papers_parser().parse_args(arguments)
            else:
                PARSERS[command]().parse_args(arguments)
    except (UsageError, argparse.ArgumentTypeError) as error:
        yield f"{line}: {error}"
    except SystemExit:
        yield f"{line}: {said.getvalue().strip().splitlines()[-1]}"
