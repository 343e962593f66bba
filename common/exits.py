"""How commands end: their exit codes, which docs/reference/commands.md explains to users, and a reader who has gone."""

import functools
import os
import select
import sys
from collections.abc import Callable
from enum import IntEnum
from typing import ParamSpec

P = ParamSpec("P")
STDOUT = 1


class Exit(IntEnum):
    DONE = 0
    INTERNAL = 1  # a fault of ours
    USAGE = 2  # a command line, environment, file or port to correct
    REFUSED = 3  # the server said no and will say so again
    UNREACHABLE = 4  # no server, or none any more
    STOPPED = 5  # the server shut the job down
    TASK = 6  # the task does not exist or raised
    DIVERGED = 7  # the parameters are no longer finite
    UNWRITTEN = 8  # what was to be kept could not be written
    INTERRUPTED = 130
    UNREAD = 141  # nobody reads standard output any more, as after `| head`
    TERMINATED = 143


def command(main: Callable[P, int]) -> Callable[P, int]:
    """Decorate the entry point of a command: end it without a traceback once nobody reads standard output.

    SIGPIPE stays ignored, as Python has it: its default would end a daemon whose peer closes a socket.
    """

    @functools.wraps(main)
    def quiet(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            try:
                return main(*args, **kwargs)
            finally:
                if sys.stdout is not None:  # as it is where the descriptor is closed
                    sys.stdout.flush()  # not when the interpreter ends, which would complain
        except BrokenPipeError:
            if not _unread():
                raise  # another pipe, or a socket
            # What could not be written may still be in the buffer, and is flushed once more at the end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)
            return Exit.UNREAD

    return quiet


def _unread() -> bool:
    """Whether nobody reads standard output any more."""
    poll = select.poll()
    poll.register(STDOUT, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))
