"""Every command that the package installs, where what holds for one holds for all."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from gradwire.common.exits import Exit

ROOT = Path(__file__).resolve().parents[2]
COMMANDS: list[str] = sorted(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"])
PLAN = ("gc-plan", "--model", "resnet50", "--bandwidth", "1gbit")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "command", [*((name, "--help") for name in COMMANDS), PLAN, ("gc-server", "--print-config")], ids=" ".join
)
def test_a_reader_who_leaves_is_no_fault(command: tuple[str, ...], unbuffered: str) -> None:
    """A reader such as `| head` leaves early, which is noticed when something is printed, or when it is
    flushed at the end."""
    reads, writes = os.pipe()
    os.close(reads)
    program = Path(sys.executable).parent / command[0]
    with open(writes, "wb") as nobody:
        done = subprocess.run(
            [program, *command[1:]],
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
            stdout=nobody,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    unnoticed = command[1] == "--help"  # argparse passes over it
    codes = (Exit.DONE, Exit.UNREAD) if unnoticed else (Exit.UNREAD,)
    assert done.returncode in codes
    assert done.stderr == ""
