"""Modules that gc-server does not import before it listens."""

from __future__ import annotations

import subprocess
import sys


def output(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)


def test_a_server_listens_without_compiler_and_kernels() -> None:
    program = """
import sys
import gradwire.server.daemon
print(*({"torch._dynamo", "numba", "llvmlite", "scipy", "sklearn"} & sys.modules.keys()))
"""
    assert output(program).stdout.strip() == ""


def test_the_first_line_comes_before_the_long_imports() -> None:
    """Under load they take half a minute, and silence looks like a server that hangs (finding U12)."""
    program = """
import sys, types
from gradwire.server.cli import main
daemon = types.ModuleType("gradwire.server.daemon")
def run(effective):
    print(*({"torch", "grpc", "numba"} & sys.modules.keys()))
    return 0
daemon.run = run
sys.modules["gradwire.server.daemon"] = daemon
sys.exit(main(["--log-format", "text"]))
"""
    done = output(program)
    assert "is starting" in done.stderr
    assert done.stdout.strip() == ""
