"""gc-server: the parameter server daemon."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from ..common import failpoints, presets
from ..common.configuration import UsageError, read
from ..common.exits import Exit, command
from ..common.version import __version__
from ..settings import COMMANDS, ServerSettings
from . import checks
from .job.modes import registry


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run gc-server with these arguments, by default those of the process; return its exit code."""
    try:
        effective = checks.adapted(
            read(
                ServerSettings,
                COMMANDS,
                argv=sys.argv[1:] if argv is None else argv,
                environ=os.environ,
                parsers=checks.PARSERS,
                epilog=f"{registry.describe()}\n{presets.listed()}",
            )
        )
        presets.check(effective)
        checks.check(effective.settings)
        failpoints.arm(os.environ.get(failpoints.VARIABLE, ""))
        if effective.settings.script and effective.chosen("task"):
            raise UsageError(
                f"--task {effective.settings.task}: not allowed with --script, where scripts bring the "
                "model; leave --task out"
            )
        if effective.print_config:
            checks.check_compressors(effective.settings)
            print(effective.describe())
            return Exit.DONE
        # gRPC's own log repeats the errors that gc-server reports.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        from ..common.telemetry import set_up_logging

        set_up_logging(effective.settings.log_format)
        # Logged before the imports of torch and grpc, which may take half a minute on a busy machine.
        log = logging.getLogger("gradwire.server")
        log.info("gc-server %s is starting", __version__)
        if effective.foreign:
            log.warning("%s", effective.foreign)
        if effective.settings.preset:
            log.info("%s", presets.describe(effective))
        checks.check_compressors(effective.settings)
        why = effective.origins["compressor"]
        if effective.settings.compressor == checks.WITHOUT_BASES and why.startswith(checks.BECAUSE):
            log.info("compressor auto: 4bit or float32, and not lowrank, %s", why)
        from .daemon import run  # imported late, because it imports torch and grpc

        return run(effective)
    except UsageError as error:
        print(f"gc-server: {error}", file=sys.stderr)
        return Exit.USAGE


if __name__ == "__main__":
    sys.exit(main())
