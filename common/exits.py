"""How commands end: their exit codes (docs/reference/commands.md explains them), and a closed standard
output."""

import functools
import io
import os
import select
import sys
from collections.abc import Callable
from enum import IntEnum
from typing import ParamSpec

P = ParamSpec("P")
STDOUT = 1


class Exit(IntEnum):
    """Exit codes of all commands."""

    DONE = 0
    INTERNAL = 1  # A fault in Gradwire.
    USAGE = 2  # The user has to correct a command line, variable, file or port.
    REFUSED = 3  # The server refused the worker; a retry would be refused too.
    UNREACHABLE = 4  # No server was found, or the connection was lost.
    STOPPED = 5  # The server shut the job down.
    TASK = 6  # The task does not exist, or it or a script of gc-run failed.
    DIVERGED = 7  # The parameters are no longer finite.
    UNWRITTEN = 8  # A result, such as --output, could not be written.
    INTERRUPTED = 130
    UNREAD = 141  # The reader of standard output has closed it, as `| head` does.
    TERMINATED = 143


def command(main: Callable[P, int]) -> Callable[P, int]:
    """Decorate a command's entry point, so that its output cannot make it fail.

    Characters that the terminal's encoding lacks are replaced: a table must not end a job that has trained.
    Once standard output has no reader, the command ends with `UNREAD`.
    No traceback is printed then. SIGPIPE stays ignored, as Python sets it: its default action would end a
    daemon whose peer closes a socket.
    """

    @functools.wraps(main)
    def quiet(*args: P.args, **kwargs: P.kwargs) -> int:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")
        try:
            try:
                return main(*args, **kwargs)
            finally:
                if sys.stdout is not None:  # None if the descriptor was closed at the start
                    sys.stdout.flush()  # here, because a failure at interpreter exit prints a traceback
        except BrokenPipeError:
            if not _unread():
                raise  # the exception belongs to another pipe or a socket
            # The interpreter flushes the rest of the buffer at exit; send it to /dev/null.
            os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)
            return Exit.UNREAD

    return quiet


def _unread() -> bool:
    """Return True if standard output is a pipe whose reader has closed it."""
    poll = select.poll()
    poll.register(STDOUT, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))
