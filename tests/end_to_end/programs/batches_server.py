"""gc-server, with a record of the samples of every round: `batches_server FILE ...`, the rest is gc-server's.

Each line of FILE is a JSON list: the epoch, and start and count of each range of its order.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from gradwire.server.cli import main
from gradwire.server.job.modes import division, rounds


def record(path: str) -> None:
    divide = division.divide
    file = open(path, "w", encoding="utf-8")  # noqa: SIM115 - as long as the process

    def recorded(*arguments: Any, **options: Any) -> Any:
        found = divide(*arguments, **options)
        if found is not None:
            drawn = [drawn for drawn, _ in found.portions()]
            ranges = [(each.start, each.count) for part in drawn for each in part.ranges]
            file.write(json.dumps([drawn[0].epoch, ranges]) + "\n")
            file.flush()
        return found

    setattr(rounds, "divide", recorded)  # noqa: B010 - not exported from there


if __name__ == "__main__":
    record(sys.argv[1])
    sys.exit(main(sys.argv[2:]))
