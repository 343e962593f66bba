"""gc-server: the parameter server daemon."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from .. import __version__
from ..exits import Exit
from ..options import Effective, UsageError, resolve
from .config import ServerConfig

DESCRIPTION = (
    "Hold the parameters of a training job, aggregate the workers' gradients and apply the optimizer."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    try:
        effective: Effective[ServerConfig] = resolve(
            ServerConfig,
            prog="gc-server",
            description=DESCRIPTION,
            argv=sys.argv[1:] if argv is None else argv,
            environ=os.environ,
            version=__version__,
        )
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what goes wrong is in our own messages
        from ..telemetry import set_up_logging

        set_up_logging(effective.config.log_format)
        # Said before the long imports, which take half a minute on a machine that is busy enough.
        logging.getLogger("gradwire.server").info("gc-server %s is starting", __version__)
        from .daemon import run  # only now: it imports torch and grpc

        return run(effective)
    except UsageError as error:
        print(f"gc-server: {error}", file=sys.stderr)
        return Exit.USAGE


if __name__ == "__main__":
    sys.exit(main())
