"""`gradwire.connect`: its arguments, and the process that calls it: children of multiprocessing, forks."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import gradwire
from gradwire.common.configuration import options_of
from gradwire.settings import WorkerSettings

# Of a worker that trains a task: the script decides the device, and has a log of its own.
NO_ARGUMENTS = {"task", "allow_task", "device", "log_format"}
PATHS = {"state", "token_file", "tls_ca", "tls_cert", "tls_key"}

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


def test_connect_has_every_option_of_a_worker_that_concerns_a_script() -> None:
    options = options_of(WorkerSettings)
    parameters = inspect.signature(gradwire.connect).parameters
    assert parameters.keys() == options.keys() - NO_ARGUMENTS
    for name, parameter in parameters.items():
        also = " | Path" if name in PATHS else ""
        assert parameter.annotation == f"{options[name].kind.__name__}{also} | None", name
        assert (parameter.kind is parameter.KEYWORD_ONLY) == (name != "server")


def test_a_wrong_argument_is_named_by_type_checkers_too() -> None:
    """mypy, which `make check` runs, complains if one of these comments is not needed."""
    with pytest.raises(TypeError, match="compresor"):
        gradwire.connect(compresor="4bit")  # type: ignore[call-arg]  # pyright: ignore
    with pytest.raises(gradwire.UsageError, match=r"^connect_seconds \(argument\): expected a finite number"):
        gradwire.connect("host", connect_seconds="soon")  # type: ignore[arg-type]  # pyright: ignore
    with pytest.raises(gradwire.UsageError, match=r"^server \(argument\): "):
        gradwire.connect("host:port")


def test_without_a_server_the_call_and_the_variable_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("GC_SERVER", "GC_CONFIG", "MASTER_ADDR"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(gradwire.UsageError, match=r"gradwire\.connect\('host:50051'\).*GC_SERVER"):
        gradwire.connect()


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
