"""Run a module's `main` as a process that does not outlive its parent.

    python -m gradwire.deploy.child MODULE [ARGUMENT ...]

Standard input is the lifeline: a pipe whose other end only the parent holds, and never writes to. The kernel
closes it when the parent ends, also by SIGKILL. Then this process sends itself SIGTERM, so that the module
can shut down, and after `GRACE_SECONDS` SIGKILL. Processes that the module has started, such as a task's data
loaders, are in the same process group and end with it.

PR_SET_PDEATHSIG would exist on Linux alone, end the child together with the parent's *thread* that started
it, and have to be set between fork and exec, where a process with gRPC threads must not run Python.
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
    """Kill this process, and its process group if it leads one, as it does when gc-run starts it."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> int:
    """Call `main` of the module named by the first argument with the remaining arguments."""
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
