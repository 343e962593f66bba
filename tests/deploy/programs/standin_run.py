"""Stands in for gc-run: starts stand-ins in the directory that it is given, and watches them."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from gradwire.deploy.engine import RunPlan, train
from gradwire.deploy.interrupt import Interrupt
from gradwire.deploy.progress import LineProgress
from gradwire.settings import RunSettings

if __name__ == "__main__":
    plan = RunPlan(
        settings=RunSettings(task="forever", compressor=sys.argv[2], workers=2),
        directory=Path(sys.argv[1]),
        server="standin_server",
        worker="standin_worker",
    )
    with Interrupt() as interrupt:
        train(plan, LineProgress(Console(), "run", 2), interrupt)
