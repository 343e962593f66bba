"""Run a module's `main` as a process that does not outlive its parent.

    python -m gradwire.deploy.child MODULE [ARGUMENT ...]

Standard input is the lifeline: a socket whose other end only the parent holds, and never writes to. The
kernel closes it when the parent ends, also by SIGKILL. Then this process sends itself SIGTERM, so that the
module can shut down, and after `GRACE_SECONDS` SIGKILL. Processes that the module has started, such as a
task's data loaders, are in the same process group and end with it. The other way the socket carries the
ports that the module listens on, in lines of name and number.

PR_SET_PDEATHSIG is not used. It exists on Linux alone, and ends the child when the parent's *thread* that
started it ends. It also has to be set between fork and exec, where a process with gRPC threads must not run
Python.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import signal
import sys
import threading
import time

from ..common import ports

GRACE_SECONDS = 5.0


def hold(lifeline: int, orphaned: threading.Event) -> None:
    """Wait until the parent ends, then end this process and its process group.

    Args:
        lifeline: file descriptor of a socket whose other end the parent holds open.
        orphaned: set once the parent has ended.
    """
    with contextlib.suppress(ConnectionResetError):  # the parent has ended without reading a port
        while os.read(lifeline, 1):  # returns no bytes once the parent has closed its end
            pass
    orphaned.set()
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:  # the default would end us before the group
        signal_group(signal.SIGTERM)
        time.sleep(GRACE_SECONDS)
    signal_group(signal.SIGKILL)


def signal_group(number: signal.Signals) -> None:
    """Send a signal to this process, with its process group if it leads one, as it does below gc-run."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), number)
    else:
        os.kill(os.getpid(), number)


def main() -> int:
    """Call `main` of the module that the first command-line argument names; return its exit code.

    The module gets the other arguments. Meanwhile a thread ends the process if its parent ends.
    """
    lifeline = os.dup(0)
    with open(os.devnull, "rb") as nothing:  # the module must not read from the lifeline
        os.dup2(nothing.fileno(), 0)
    orphaned = threading.Event()
    threading.Thread(target=hold, args=(lifeline, orphaned), daemon=True, name="lifeline").start()
    for stream in (sys.stdout, sys.stderr):  # the log, which the parent reads as UTF-8
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")

    def announce(name: str, port: int) -> None:
        with contextlib.suppress(OSError):  # the parent has ended
            os.write(lifeline, f"{name} {port}\n".encode())

    ports.announce = announce
    module, *arguments = sys.argv[1:]
    try:
        code: int = importlib.import_module(module).main(arguments)
    finally:
        if orphaned.is_set():  # the parent can neither read the code nor end the group
            signal_group(signal.SIGKILL)
    return code


if __name__ == "__main__":
    sys.exit(main())
