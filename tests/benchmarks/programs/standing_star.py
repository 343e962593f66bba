"""A benchmark whose network stands until a signal comes. It prints a line once it does."""

from __future__ import annotations

import signal
import sys
import time

from gradwire.benchmarks.cli import exit_code
from gradwire.benchmarks.star import Star


def main() -> None:
    with Star(["server", "worker-0"], 16):
        print("standing", flush=True)
        time.sleep(300)


if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests that run under nohup have it ignored
    sys.exit(exit_code("standing star", main))
