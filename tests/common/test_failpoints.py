"""Failpoints: what they do when armed, that they cost nothing when not, and that code and table agree."""

from __future__ import annotations

import ast
import errno
import subprocess
import sys
import time
import timeit
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradwire.common import failpoints

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    failpoints.arm("")


def failing(point: str, times: int) -> list[int]:
    """At which of so many times the point raised, counted from 1."""
    found: list[int] = []
    for number in range(1, times + 1):
        try:
            failpoints.reached(point)
        except OSError as error:
            found.append(number if error.errno == errno.ENOSPC and point in str(error) else -number)
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("journal.appended=enospc", [1, 2, 3, 4, 5]),
        ("journal.appended=enospc@2", [2]),
        ("journal.appended=enospc@4+", [4, 5]),
        ("journal.appended=enospc@2, journal.appended=enospc@5", [2, 5]),
        ("journal.synced=enospc", []),
    ],
)
def test_a_point_fails_as_often_as_it_is_armed_to(text: str, expected: list[int]) -> None:
    failpoints.arm(text)
    assert failing("journal.appended", 5) == expected
    failpoints.arm(text)
    assert failing("journal.appended", 5) == expected, "arming counts anew"


def test_a_point_can_delay() -> None:
    failpoints.arm("version.applied=sleep:0.05@1")
    began = time.monotonic()
    failpoints.reached("version.applied")
    slept = time.monotonic() - began
    assert 0.05 <= slept < 5


def test_a_point_kills_its_process_as_kill_9_does() -> None:
    program = (
        "from gradwire.common import failpoints\n"
        "failpoints.arm('push.decided=kill@3')\n"
        "for number in range(9):\n"
        "    print(number, flush=True)\n"
        "    failpoints.reached('push.decided')\n"
    )
    environ = {"PYTHONPATH": str(ROOT / ".typing")}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True)
    assert done.returncode == -9
    assert done.stdout.split() == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("journal.apended=kill", "unknown point 'journal.apended'"),
        ("journal.appended", "expected POINT=ACTION"),
        ("journal.appended=explode", "got 'explode'"),
        ("journal.appended=sleep", "expected seconds after sleep"),
        ("journal.appended=kill:3", "expected seconds after sleep"),
    ],
)
def test_what_cannot_be_armed_is_said(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        failpoints.arm(text)


@pytest.mark.parametrize(
    ("module", "flags"), [("gradwire.server.cli", ()), ("gradwire.worker.cli", ("--server", "localhost"))]
)
def test_the_daemons_read_the_variable_at_their_start(module: str, flags: tuple[str, ...]) -> None:
    environ = {"PYTHONPATH": str(ROOT / ".typing"), failpoints.VARIABLE: "nothing.here=kill"}
    command = [sys.executable, "-m", module, *flags, "--print-config"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 2
    assert "unknown point 'nothing.here'" in done.stderr


def test_when_off_it_costs_next_to_nothing() -> None:
    """A step reaches a handful of points, and takes milliseconds. The bound is for a busy machine."""
    calls = 20_000
    seconds = min(timeit.repeat(lambda: failpoints.reached("push.decided"), number=calls, repeat=5))
    assert seconds / calls < 2e-6


def test_code_reaches_no_point_that_the_table_lacks() -> None:
    for path in [*ROOT.glob("*.py"), *(ROOT / "server").rglob("*.py"), *(ROOT / "worker").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(ast.Attribute(ast.Name("failpoints"), "reached"), [argument]):
                    assert isinstance(argument, ast.Constant), path
                    assert argument.value in failpoints.POINTS, path
                case _:
                    pass
