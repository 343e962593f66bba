"""gc-worker, with a note of every outcome that it is told: `noting_worker FILE ...`, where the rest is
gc-worker's.

A line of FILE is the worker, its incarnation, the push, and the version that the push is in, 0 if it is in
none. It is written before anything follows from the outcome, and outlives the process.
"""

from __future__ import annotations

import json
import os
import sys

from gradwire.proto import messages as m
from gradwire.proto.refusal import Reason
from gradwire.worker.cli import main
from gradwire.worker.session.pushes import Pushes

DECIDED = (Reason.STALE, Reason.REDUNDANT)  # by control; other refusals are of bytes


def note(path: str) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    settle = Pushes.settle

    def noting(self: Pushes, outcome: m.Outcome) -> None:
        if outcome.refusal is None or outcome.refusal.reason in DECIDED:
            connection = self.connection
            version = outcome.version if outcome.decision is m.Decision.ACCEPTED else 0
            line = json.dumps([connection.worker, connection.incarnation, outcome.seq, version])
            os.write(file, f"{line}\n".encode())
        settle(self, outcome)

    Pushes.settle = noting  # type: ignore[method-assign]


if __name__ == "__main__":
    note(sys.argv[1])
    sys.exit(main(sys.argv[2:]))
