"""Runs a module's `main` as a process that does not outlive the one that started it.

    python -m gradwire.deploy.child MODULE [ARGUMENT ...]

Standard input is the lifeline: a pipe whose other end only the parent holds, and never writes to. The kernel
closes it when the parent ends, in whatever way, SIGKILL included. Then this process sends itself SIGTERM, so
that the module can leave in good order, and SIGKILL if it does not. What the module has started itself, such
as a task's loader processes, is in the same group and goes with it.

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


def hold(lifeline: int, orphaned: threading.Event) -> None:
    """Wait for the other end of the pipe to close, then end this process and its group."""
    while os.read(lifeline, 1):  # returns nothing at the end of the pipe
        pass
    orphaned.set()
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:  # that would end us before we end the group
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE_SECONDS)
    end_group()


def end_group() -> None:
    """End this process and, if it leads its group, as gc-run starts it, whatever else is in that."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> int:
    """Call `main` of the module that the first argument names with the arguments after it."""
    lifeline = os.dup(0)
    with open(os.devnull) as nothing:  # the module must not read the lifeline away
        os.dup2(nothing.fileno(), 0)
    orphaned = threading.Event()
    threading.Thread(target=hold, args=(lifeline, orphaned), daemon=True, name="lifeline").start()
    module, *arguments = sys.argv[1:]
    try:
        code: int = importlib.import_module(module).main(arguments)
    finally:
        if orphaned.is_set():  # nobody is left to read the code, or to end the group
            end_group()
    return code


if __name__ == "__main__":
    sys.exit(main())
