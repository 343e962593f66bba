"""Every command that the package installs, where what holds for one holds for all."""

from __future__ import annotations

import os
import re
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


ASK_BASH = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
function=$(complete -p "$1" | sed 's/.*-F \\([^ ]*\\).*/\\1/')
"$function" "$1" "${@: -1}" "${@: -2:1}"
echo "${COMPREPLY[*]}"
"""


@pytest.fixture(scope="module")
def completion(tmp_path_factory: pytest.TempPathFactory) -> Path:
    script = tmp_path_factory.mktemp("completion") / "gradwire.bash"
    printed = subprocess.run(
        [sys.executable, "-m", "gradwire.deploy.completion", "bash"], stdout=subprocess.PIPE, check=True
    )
    script.write_bytes(printed.stdout)
    return script


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("gc-server --mo", "--mode"),
        ("gc-server --overlap ", "off backward both"),
        ("gc-worker --compressor lo", "lowrank"),
        ("gc-bench st", "step"),
        ("gc-bench step --ru", "--runs"),
        ("gc-certs --ho", "--host"),
    ],
)
def test_bash_completes(typed: str, completed: str, completion: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", ASK_BASH, "bash", completion, *typed.split(" ")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == f"{completed}\n", done.stderr


def test_every_command_has_a_completion(completion: Path) -> None:
    assert set(COMMANDS) <= set(re.findall(r"^complete .* (gc-\w+)$", completion.read_text(), re.M))
