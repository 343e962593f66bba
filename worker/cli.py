"""The command gc-worker, which runs one worker daemon."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from ..common import failpoints
from ..common.configuration import UsageError, read
from ..common.exits import Exit, command
from ..settings import COMMANDS, WorkerSettings
from .tasks import TaskError


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run gc-worker and return its exit code. `argv` has no program name; None for the process's
    arguments."""
    try:
        effective = read(
            WorkerSettings,
            COMMANDS,
            argv=sys.argv[1:] if argv is None else argv,
            environ=os.environ,
        )
        failpoints.arm(os.environ.get(failpoints.VARIABLE, ""))
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # Gradwire logs every error itself
        # A task may fork, as a DataLoader with workers does. gRPC's fork handlers would kill the child while
        # a stream is open. Without the handlers a fork is safe as long as the child does not use gRPC.
        os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
        from .daemon import check, run  # late, because it imports torch and grpc

        own = check(effective.settings)
        if effective.print_config:
            print(effective.describe())
            return Exit.DONE
        return run(effective, own)
    except UsageError as error:
        return _fail(Exit.USAGE, error)
    except TaskError as error:
        return _fail(Exit.TASK, error)


def _fail(code: Exit, error: Exception) -> int:
    """Print the error, and return the exit code."""
    print(f"gc-worker: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
