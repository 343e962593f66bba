"""Runs a module's `main` as a process that does not outlive the one that started it.

    python -m gradwire.deploy.child MODULE [ARGUMENT ...]

Standard input is the lifeline: a pipe whose other end only the parent holds, and never writes to. The kernel
closes it when the parent ends, in whatever way, SIGKILL included. Then this process sends itself SIGTERM, so
that the module can leave in good order, and SIGKILL if it does not.

Chosen over PR_SET_PDEATHSIG, which is for Linux alone, ends the child when the *thread* that started it does,
and would have to be set between fork and exec, where a process with gRPC threads must not run Python.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import time

GRACE_SECONDS = 5.0


def hold(lifeline: int) -> None:
    """Wait for the other end of the pipe to close, then end this process."""
    while os.read(lifeline, 1):  # returns nothing at the end of the pipe
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> int:
    """Call `main` of the module that the first argument names with the arguments after it."""
    lifeline = os.dup(0)
    with open(os.devnull) as nothing:  # the module must not read the lifeline away
        os.dup2(nothing.fileno(), 0)
    threading.Thread(target=hold, args=(lifeline,), daemon=True, name="lifeline").start()
    module, *arguments = sys.argv[1:]
    code: int = importlib.import_module(module).main(arguments)
    return code


if __name__ == "__main__":
    sys.exit(main())
