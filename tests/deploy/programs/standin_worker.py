"""Stands in for gc-worker: does as its compressor says, and trains nothing.

sleep: stays. stubborn: stays, also when asked to end. leaves-N: worker-0 exits with N, the others stay.
all-N: every one exits with N. killed: worker-0 kills itself.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence

from gradwire.common import ports


def main(argv: Sequence[str]) -> int:
    arguments = dict(argument.removeprefix("--").split("=", 1) for argument in argv)
    behaviour, _, code = arguments["compressor"].partition("-")
    print(f"pid {os.getpid()}", flush=True)
    ports.announce("http", 1)  # the parent may end without having read it
    if behaviour == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if behaviour == "all" or arguments["worker-id"] == "worker-0":
        if code:
            print(f"about to exit with {code}", file=sys.stderr)
            return int(code)
        if behaviour == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
    return 0
