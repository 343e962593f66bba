"""The arrows between rooms, as ARCHITECTURE.md draws them, hold in every file."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

import pytest

from gradwire.server.job.modes.registry import MODES

ROOT = Path(__file__).resolve().parents[2]

# Which rooms a room may import. "" is the root: the face of the package, and settings.
BASE = {"", "common", "optim"}
ARROWS = {
    "": {"", "common", "optim"},
    "common": {"common"},
    "storage": {"common", "storage"},
    "optim": {"common", "optim"},
    "coded": {*BASE, "proto", "server", "coded", "coded.arithmetic"},  # of server/ only server/job
    "coded.arithmetic": {"coded.arithmetic"},
    "compressors": {*BASE, "compressors"},
    "planning": {"", "common", "compressors", "planning"},
    "proto": {*BASE, "compressors", "proto"},
    "ddp": {*BASE, "compressors", "proto", "ddp"},
    "integrations": {*BASE, "ddp", "server", "worker", "integrations"},
    "server": {*BASE, "storage", "coded", "planning", "compressors", "proto", "server"},
    "worker": {*BASE, "storage", "coded.arithmetic", "planning", "compressors", "proto", "worker"},
    "deploy": {*BASE, "storage", "planning", "compressors", "proto", "server", "worker", "deploy"},
    "benchmarks": {
        *(*BASE, "storage", "coded", "coded.arithmetic", "planning", "compressors", "proto", "ddp"),
        *("server", "worker", "deploy", "benchmarks"),
    },
}

# Which rooms of worker/ a room there may import: two drivers of one training step. Files of worker/ itself
# may import all of them, and only `metrics` may be imported by the rooms.
IN_WORKER = {
    "session": {"session"},
    "training": {"session", "training"},
    "tasks": {"session", "training", "tasks"},
    "script": {"session", "training", "script"},
}
# The files and folders at the top of server/, from top to bottom. A file imports its own layer and lower
# ones. The rooms of a layer may import each other, but for those in `APART`.
SERVER_LAYERS = (
    {"cli", "daemon", "checks"},
    {"calls", "recovery"},
    {"conductor"},
    {"plans", "streams", "reporting", "metrics", "history", "tasks", "curves"},
    {"durable"},
    {"shard", "job"},
)
APART = {"calls", "recovery"}
AGAINST_LAYERS = frozenset[tuple[str, str]]()  # (file, imported file) that are excepted, at most 2

PUBLIC = PurePosixPath("__init__.py")  # the public API: what a script sees of a worker and of ddp

# Pure: no network, no clock, and threads in one file only.
PURE = {"coded.arithmetic", "compressors", "planning"}
NOT_IN_PURE = {"asyncio", "datetime", "grpc", "http", "multiprocessing", "socket", "time", "uvloop"}
THREADS = {"concurrent", "threading"}
HAS_THREADS = PurePosixPath("compressors/kernels/threads.py")
WAITS = PurePosixPath("compressors/kernels/compile_lock.py"), "time"  # for another process, with a bound
# What reads bytes by running them; nobody here may.
NOWHERE = {"cloudpickle", "dill", "marshal", "pickle", "shelve"}

READS = {"argv", "environ", "getenv"}
# Programs, beside every cli.py and the benchmarks.
ENTRY_POINTS = {
    PurePosixPath("deploy/child.py"),
    PurePosixPath("deploy/completion.py"),
    PurePosixPath("deploy/doctor.py"),
    PurePosixPath("deploy/plan.py"),
    PurePosixPath("deploy/watch.py"),
    PurePosixPath("deploy/certs.py"),
    PurePosixPath("deploy/reference.py"),
    PurePosixPath("integrations/ray.py"),  # sets variables in the processes of Ray's workers
    PurePosixPath("worker/script/api.py"),
}


# Nobody here asks which mode a job has: each question is a property of the mode.
MODES_UNKNOWN = {"server", "deploy"}
MODES_FOLDER = PurePosixPath("server/job/modes")
MODE_NAMES = {*MODES, "exchange"}
NOT_OF_MODES = {
    PurePosixPath("server/job/initial.py"): {"how != 'local'"},  # --buffers
    PurePosixPath("deploy/prepare.py"): {"work.partition(':')[0] == 'local'"},  # the worker's kind of work
    # Predictions of planning, which has formulas for some modes by name.
    PurePosixPath("deploy/plan_tables.py"): {"mode.startswith('sync')", "mode == 'sync'"},
}


def may_read_the_process(path: PurePosixPath) -> bool:
    """Whether a file may read the command line and the environment."""
    return path.name == "cli.py" or path.parts[0] == "benchmarks" or path in ENTRY_POINTS


def may_touch_protobuf(path: PurePosixPath) -> bool:
    return path.parts[0] == "proto"


def imported(path: PurePosixPath, tree: ast.AST) -> Iterator[str]:
    """Dotted names that a file imports, wherever in the file; those of this package start with a dot."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level == 0:
                base = node.module or ""
            else:
                folder = path.parts[: len(path.parts) - node.level]
                base = "." + ".".join((*folder, *filter(None, [node.module])))
            yield from (f"{base}.{alias.name}".replace("..", ".") for alias in node.names)


def room_of(parts: Sequence[str]) -> str:
    """Return the room of a folder or of a dotted name. The arithmetic of coded mode is one of its own."""
    if tuple(parts[:2]) == ("coded", "arithmetic"):
        return "coded.arithmetic"
    return parts[0] if parts and parts[0] in ARROWS else ""


def violations(path: PurePosixPath, source: str) -> list[str]:
    """Return the imports of a file at `path`, relative to the root, that its room may not have."""
    tree = ast.parse(source)
    room = room_of(path.parts[:-1])
    allowed = ARROWS["worker"] | {"ddp"} if path == PUBLIC else ARROWS[room]
    found: list[str] = []
    for name in imported(path, tree):
        top, *rest = name.removeprefix(".").split(".")
        if top == "gradwire":
            found.append(f"{name}: rooms import each other relatively")
        elif name.startswith("."):
            target = room_of((top, *rest))
            if target not in allowed:
                found.append(f"{name}: {room or 'the root'} may not import {target}")
            if (room, target) == ("coded", "server") and rest[:1] != ["job"]:
                found.append(f"{name}: a mode imports no other room of server/ than control")
            inner = IN_WORKER.get(path.parent.name) if room == "worker" else None
            if inner is not None and top == "worker" and not {*rest[:1]} <= {*inner, "metrics"}:
                found.append(f"{name}: worker/{path.parent.name} may not import worker/{'.'.join(rest[:1])}")
            if any(part.endswith("_pb2") for part in rest) and not may_touch_protobuf(path):
                found.append(f"{name}: only proto touches a protobuf class")
        elif not may_touch_protobuf(path) and (name.startswith("google.protobuf") or "_pb2" in name):
            found.append(f"{name}: only proto touches a protobuf class")
        elif room in PURE and top in NOT_IN_PURE and (path, top) != WAITS:
            found.append(f"{name}: {room} is pure")
        elif room in PURE and top in THREADS and path != HAS_THREADS:
            found.append(f"{name}: threads are the business of {HAS_THREADS}")
        elif top in NOWHERE:
            found.append(f"{name}: nothing is unpickled")
    if not may_read_the_process(path):
        found += [f"{what}: only an entry point may" for what in process_reads(tree)]
    return found


def process_reads(tree: ast.AST) -> Iterator[str]:
    """Uses of the command line and the environment, also by an argparse parser left to find its own."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(ast.Name("sys"), "argv") | ast.Attribute(ast.Name("os"), "environ" | "getenv"):
                yield ast.unparse(node)
            case ast.ImportFrom("os" | "sys") if names := READS & {alias.name for alias in node.names}:
                yield f"{node.module}.{', '.join(sorted(names))}"
            case ast.Call(ast.Attribute(_, "parse_args"), []):
                yield "parse_args() without arguments"
            case _:
                pass


def mode_questions(path: PurePosixPath, source: str) -> list[str]:
    """Return where a file outside of `server/job/modes` asks which mode it is: comparisons with its name or
    kind of work, and `isinstance` of its class."""
    if path.parts[0] not in MODES_UNKNOWN or path.is_relative_to(MODES_FOLDER):
        return []
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Compare():
                asked = any(map(_names_a_mode, (node.left, *node.comparators)))
            case ast.Call(ast.Attribute(_, "startswith"), [what, *_]):
                asked = _names_a_mode(what)
            case ast.Call(ast.Name("isinstance"), [what, _]):
                asked = ast.unparse(what).endswith(("mode", "options.mode"))
            case ast.MatchValue(what):
                asked = _names_a_mode(what)
            case _:
                asked = False
        if asked and ast.unparse(node) not in NOT_OF_MODES.get(path, ()):
            found.append(f"{ast.unparse(node)}: ask the mode, not which one it is")
    return found


def _names_a_mode(node: ast.expr) -> bool:
    match node:
        case ast.Constant(str(text)):
            return text.partition(":")[0] in MODE_NAMES
        case ast.Tuple(each) | ast.List(each) | ast.Set(each):
            return any(map(_names_a_mode, each))
        case _:
            return False


def source_files() -> list[str]:
    """All but stubs, and the example of a user's script."""
    files = [
        path
        for room in filter(None, ARROWS)
        if room != "coded.arithmetic"
        for path in (ROOT / room).rglob("*.py")
    ]
    return sorted(
        str(path.relative_to(ROOT))
        for path in [*ROOT.glob("*.py"), *files]
        if not path.name.endswith("_pb2.py") and "kubernetes" not in path.parts
    )


def test_every_file_keeps_to_its_room() -> None:
    for path in map(PurePosixPath, source_files()):
        source = (ROOT / path).read_text()
        assert [*violations(path, source), *mode_questions(path, source)] == [], path


@pytest.mark.parametrize(
    "source",
    [
        "if mode.work == 'exchange': pass",
        "settings.mode in ('stale', 'async')",
        "settings.mode.startswith('coded')",
        "isinstance(self.core.mode, Rounds)",
        "match name:\n    case 'sync': pass",
    ],
)
def test_questions_for_the_mode_are_found(source: str) -> None:
    assert mode_questions(PurePosixPath("server/daemon.py"), source) != []
    assert mode_questions(PurePosixPath("server/job/modes/registry.py"), source) == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("server/core.py", "from ..worker.tasks import digits"),
        ("server/core.py", "from .. import worker"),
        ("server/core.py", "from ..ddp import bundle"),
        ("ddp/hook.py", "from ..worker import session"),
        ("worker/tasks/digits.py", "def load():\n    from ...server import core"),
        ("worker/training/step.py", "from ..tasks import computation"),
        ("worker/script/job.py", "from ..tasks.computation import ModelSnapshot"),
        ("worker/session/session.py", "from ..training.step import Strategy"),
        ("settings.py", "from .server import core"),
        ("compressors/kernels/codes.py", "from ...proto import wire"),
        ("compressors/model.py", "import grpc.aio"),
        ("compressors/model.py", "from time import monotonic"),
        ("compressors/model.py", "import threading"),
        ("compressors/model.py", "from ..planning import fit"),
        ("planning/step.py", "from ..proto import messages"),
        ("planning/step.py", "import time"),
        ("coded/arithmetic/plan.py", "import time"),
        ("coded/arithmetic/plan.py", "from ...proto import messages"),
        ("coded/exchanges.py", "from ..server.conductor import Conductor"),
        ("worker/training/coded.py", "from ...coded import exchanges"),
        ("server/core.py", "from google.protobuf import message"),
        ("server/core.py", "from google.protobuf.message import Message"),
        ("server/core.py", "from ..proto import gradwire_pb2"),
        ("server/core.py", "from ..proto.gradwire_pb2 import Chunk"),
        ("server/health.py", "from grpc_health.v1 import health_pb2"),
        ("benchmarks/step.py", "from ..proto import gradwire_pb2"),
        ("benchmarks/step.py", "from google.protobuf import message"),
        ("worker/session/connection.py", "import gradwire.proto.wire"),
        ("worker/session/connection.py", "import pickle"),
        ("worker/session/connection.py", "import os\nos.environ['GC_TOKEN']"),
        ("worker/session/connection.py", "from os import environ"),
        ("worker/session/connection.py", "import sys\nprint(sys.argv)"),
        ("worker/session/connection.py", "parser.parse_args()"),
    ],
)
def test_violations_are_found(path: str, source: str) -> None:
    assert violations(PurePosixPath(path), source) != []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("server/cli.py", "import os, sys\nmain(sys.argv[1:], os.environ)"),
        ("server/core.py", "from ..proto import wire\nfrom .. import settings"),
        ("proto/wire.py", "from google.protobuf.message import Message\nfrom . import gradwire_pb2 as pb"),
        ("compressors/kernels/threads.py", "import threading"),
        ("deploy/launch.py", "from ..server import cli\nfrom ..worker import tasks"),
        ("worker/session/connection.py", "import grpc.aio, time, threading"),
    ],
)
def test_what_is_allowed_passes(path: str, source: str) -> None:
    assert violations(PurePosixPath(path), source) == []


def test_control_imports_no_other_room_of_the_server() -> None:
    """Other rooms of the server may import control, and control none of them."""
    for path in (each for each in source_files() if each.startswith("server/job/")):
        names = imported(PurePosixPath(path), ast.parse((ROOT / path).read_text()))
        server = [name for name in names if name.startswith(".server.")]
        assert [name for name in server if not name.startswith(".server.job.")] == [], path


# ---- which file imports which


def file_of(name: str, files: Collection[str]) -> str | None:
    """Return the file that a dotted name of this package is, or is in."""
    parts = name.removeprefix(".").split(".")
    for inside in (parts, parts[:-1]):
        stem = "/".join(inside)
        for path in (f"{stem}.py", f"{stem}/__init__.py" if stem else "__init__.py"):
            if path in files:
                return path
    return None


def graph_of(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Return the files that each file imports, wherever in it. sources: text by path."""
    graph: dict[str, set[str]] = {}
    for path, source in sources.items():
        names = imported(PurePosixPath(path), ast.parse(source))
        found = {file_of(name, sources) for name in names if name.startswith(".")}
        graph[path] = {each for each in found if each is not None and each != path}
    return graph


def cycles_of(graph: Mapping[str, set[str]]) -> list[set[str]]:
    """Return the groups of files that import each other, directly or through others."""

    def reached_from(path: str) -> set[str]:
        reached: set[str] = set()
        left = [path]
        while left:
            more = graph[left.pop()] - reached
            reached |= more
            left += more
        return reached

    reached = {path: reached_from(path) for path in graph}
    cycles: list[set[str]] = []
    for path in graph:
        group = {each for each in reached[path] if path in reached[each]}
        if group and group not in cycles:
            cycles.append(group)
    return cycles


def against_layers(graph: Mapping[str, set[str]]) -> set[tuple[str, str]]:
    """Return the imports within server/ that go up, or from a room to one that is apart from it."""
    layer_of = {room: number for number, rooms in enumerate(SERVER_LAYERS) for room in rooms}

    def room_of(path: str) -> str:
        return PurePosixPath(path).parts[1].removesuffix(".py")

    def goes_up(one: str, other: str) -> bool:
        return layer_of[other] < layer_of[one] or (one != other and {one, other} <= APART)

    server = {path for path in graph if path.startswith("server/") and path != "server/__init__.py"}
    return {
        (path, other)
        for path in server
        for other in graph[path] & server
        if goes_up(room_of(path), room_of(other))
    }


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    return graph_of({path: (ROOT / path).read_text() for path in source_files()})


def test_no_file_imports_itself_through_others(graph: dict[str, set[str]]) -> None:
    assert cycles_of(graph) == []


def test_server_imports_go_down(graph: dict[str, set[str]]) -> None:
    assert against_layers(graph) - AGAINST_LAYERS == set()
    assert len(AGAINST_LAYERS) <= 2


def test_cycles_and_imports_that_go_up_are_found() -> None:
    graph = graph_of(
        {
            "server/__init__.py": "",
            "server/conductor.py": "if TYPE_CHECKING:\n    from .calls.service import Service",
            "server/calls/service.py": "from ..recovery import image\nfrom ..job.core import Core",
            "server/recovery/image.py": "def f():\n    from ..conductor import Conductor",
            "server/job/core.py": "from . import events as e\nimport json",
            "server/job/events.py": "from ..shard import shard",
            "server/shard/shard.py": "",
        }
    )
    assert cycles_of(graph) == [
        {"server/conductor.py", "server/calls/service.py", "server/recovery/image.py"}
    ]
    assert against_layers(graph) == {
        ("server/conductor.py", "server/calls/service.py"),
        ("server/calls/service.py", "server/recovery/image.py"),
    }
