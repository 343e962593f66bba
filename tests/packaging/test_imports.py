"""The arrows between rooms, as ARCHITECTURE.md draws them, hold in every file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Which rooms a room may import. "" is the root: settings, telemetry and the like.
ARROWS = {
    "": {""},
    "coding": {"coding"},
    "planning": {"", "planning"},
    "compressors": {"", "planning", "compressors"},
    "proto": {"", "planning", "compressors", "proto"},
    "ddp": {"", "planning", "compressors", "proto", "ddp"},
    "server": {"", "coding", "planning", "compressors", "proto", "server"},
    "worker": {"", "coding", "planning", "compressors", "proto", "worker"},
    "deploy": {"", "coding", "planning", "compressors", "proto", "server", "worker", "deploy"},
    "benchmarks": {
        *("", "coding", "planning", "compressors", "proto", "ddp"),
        *("server", "worker", "deploy", "benchmarks"),
    },
}

PUBLIC = PurePosixPath("__init__.py")  # the public API: what a script sees of a worker

# Pure: no network, no clock, and threads in one file only.
PURE = {"coding", "compressors", "planning"}
NOT_IN_PURE = {"asyncio", "datetime", "grpc", "http", "multiprocessing", "socket", "time", "uvloop"}
THREADS = {"concurrent", "threading"}
HAS_THREADS = PurePosixPath("compressors/kernels/threads.py")
# What reads bytes by running them; nobody here may.
NOWHERE = {"cloudpickle", "dill", "marshal", "pickle", "shelve"}

TIMES_PROTOBUF = PurePosixPath("benchmarks/push.py")  # as a peer of our own framing
READS = {"argv", "environ", "getenv"}
# Programs, beside every cli.py and the benchmarks.
ENTRY_POINTS = {
    PurePosixPath("proto/generate.py"),
    PurePosixPath("deploy/child.py"),
    PurePosixPath("deploy/doctor.py"),
    PurePosixPath("deploy/plan.py"),
    PurePosixPath("deploy/watch.py"),
    PurePosixPath("deploy/certs.py"),
    PurePosixPath("deploy/reference.py"),
    PurePosixPath("worker/script/api.py"),
}


def may_read_the_process(path: PurePosixPath) -> bool:
    """Whether a file may read the command line and the environment."""
    return path.name == "cli.py" or path.parts[0] == "benchmarks" or path in ENTRY_POINTS


def may_touch_protobuf(path: PurePosixPath) -> bool:
    return path.parts[0] == "proto" or path == TIMES_PROTOBUF


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


def violations(path: PurePosixPath, source: str) -> list[str]:
    """What a file at `path`, relative to the root, does that its room may not."""
    tree = ast.parse(source)
    room = path.parts[0] if len(path.parts) > 1 else ""
    if path == PUBLIC:
        room = "worker"
    found: list[str] = []
    for name in imported(path, tree):
        top, *rest = name.removeprefix(".").split(".")
        if top == "gradwire":
            found.append(f"{name}: rooms import each other relatively")
        elif name.startswith("."):
            target = top if top in ARROWS else ""
            if target not in ARROWS[room]:
                found.append(f"{name}: {room or 'the root'} may not import {target}")
            if any(part.endswith("_pb2") for part in rest) and not may_touch_protobuf(path):
                found.append(f"{name}: only proto touches a protobuf class")
        elif not may_touch_protobuf(path) and (name.startswith("google.protobuf") or "_pb2" in name):
            found.append(f"{name}: only proto touches a protobuf class")
        elif room in PURE and top in NOT_IN_PURE:
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


def source_files() -> list[str]:
    files = [path for room in filter(None, ARROWS) for path in (ROOT / room).rglob("*.py")]
    return sorted(
        str(path.relative_to(ROOT))
        for path in [*ROOT.glob("*.py"), *files]
        if not path.name.endswith("_pb2.py")
    )


@pytest.mark.parametrize("path", source_files())
def test_file_keeps_to_its_room(path: str) -> None:
    assert violations(PurePosixPath(path), (ROOT / path).read_text()) == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("server/core.py", "from ..worker.tasks import digits"),
        ("server/core.py", "from .. import worker"),
        ("server/core.py", "from ..ddp import bundle"),
        ("ddp/hook.py", "from ..worker import session"),
        ("worker/tasks/digits.py", "def load():\n    from ...server import core"),
        ("settings.py", "from .server import core"),
        ("compressors/kernels/codes.py", "from ...proto import wire"),
        ("compressors/model.py", "import grpc.aio"),
        ("compressors/model.py", "from time import monotonic"),
        ("compressors/model.py", "import threading"),
        ("planning/step.py", "from ..compressors import divide"),
        ("planning/step.py", "import time"),
        ("coding/plan.py", "import time"),
        ("coding/plan.py", "from ..proto import messages"),
        ("server/core.py", "from google.protobuf import message"),
        ("server/core.py", "from google.protobuf.message import Message"),
        ("server/core.py", "from ..proto import gradwire_pb2"),
        ("server/core.py", "from ..proto.gradwire_pb2 import Chunk"),
        ("server/health.py", "from grpc_health.v1 import health_pb2"),
        ("benchmarks/wire.py", "from ..proto import gradwire_pb2"),
        ("benchmarks/wire.py", "from google.protobuf import message"),
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
        ("benchmarks/push.py", "from ..proto import gradwire_pb2 as pb"),
        ("compressors/kernels/threads.py", "import threading"),
        ("deploy/launch.py", "from ..server import cli\nfrom ..worker import tasks"),
        ("worker/session/connection.py", "import grpc.aio, time, threading"),
    ],
)
def test_what_is_allowed_passes(path: str, source: str) -> None:
    assert violations(PurePosixPath(path), source) == []
