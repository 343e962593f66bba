"""`gradwire.connect` and the process that calls it: children of multiprocessing, forks, a second call."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

WITHOUT_GUARD = """
import multiprocessing, sys, numpy, gradwire
from gradwire.worker.script.loading import Loading
if __name__ != "__main__":  # else it has connected
    gradwire.connect(server="127.0.0.1:1")
multiprocessing.set_start_method(sys.argv[1])
Loading(range(4), 1).fetch(numpy.arange(4))
"""
LAUNCHER = """
import multiprocessing, sys, gradwire
def rank():
    try:
        gradwire.connect(server="127.0.0.1:1", connect_seconds=0.1)
    except gradwire.UnreachableError:
        sys.exit(42)
if __name__ == "__main__":
    process = multiprocessing.get_context(sys.argv[1]).Process(target=rank)
    process.start()
    process.join()
    sys.exit(process.exitcode)
"""


def run(folder: Path, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script to its end."""
    file = folder / "program.py"
    file.write_text(program)
    command = [sys.executable, str(file), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_a_loaders_process_that_imports_the_script_does_not_join(tmp_path: Path) -> None:
    """Also not the process that forks the others, which imports the script too."""
    ended = run(tmp_path, WITHOUT_GUARD, "forkserver")
    assert ended.returncode == 1
    assert "gradwire.connect: this process" in ended.stderr  # the process
    assert ended.stderr.rstrip().endswith("under if __name__ == '__main__':")  # the script


def test_a_process_that_a_launcher_starts_may_connect(tmp_path: Path) -> None:
    assert run(tmp_path, LAUNCHER, "spawn").returncode == 42
