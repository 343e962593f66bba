"""Run a user's command as the process of a script's worker. `child` calls `main` in a process of its own.

The command is in the process group of this process, so signals to the group reach it, too. This process only
waits for it, and then ends as it did.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Run the command `argv` to its end and return its exit code; after a signal end by the same signal."""
    # A handler, because the command would inherit SIG_IGN. It gets the signal itself.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    code = subprocess.call(argv)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code
