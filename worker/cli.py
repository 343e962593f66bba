"""gc-worker: one worker daemon."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from .. import __version__
from ..exits import Exit
from ..options import Effective, UsageError, resolve
from .config import WorkerConfig

DESCRIPTION = "Join a training job: compute gradients, compress them, push them to the server."


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    try:
        effective: Effective[WorkerConfig] = resolve(
            WorkerConfig,
            prog="gc-worker",
            description=DESCRIPTION,
            argv=sys.argv[1:] if argv is None else argv,
            environ=os.environ,
            version=__version__,
        )
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what goes wrong is in our own messages
        from .daemon import run  # only now: it imports torch and grpc

        return run(effective)
    except UsageError as error:
        print(f"gc-worker: {error}", file=sys.stderr)
        return Exit.USAGE


if __name__ == "__main__":
    sys.exit(main())
