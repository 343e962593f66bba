"""Exit codes of the commands; the table in docs/commands.md explains them to users."""

from enum import IntEnum


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
    TERMINATED = 143
