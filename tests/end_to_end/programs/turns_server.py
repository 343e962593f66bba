"""gc-server, with a plan by which the parts nearest to the model's input go first: `turns_server CREDIT ...`,
the rest is gc-server's."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from gradwire.proto.manifest import Manifest
from gradwire.server.cli import main


def turn_round(credit: int) -> None:
    plan = Manifest.plan

    def turned(*arguments: Any, **options: Any) -> Any:
        found = plan(*arguments, **options)
        return replace(found, turns=tuple(reversed(range(len(found.parts)))), credit=credit)

    setattr(Manifest, "plan", turned)  # noqa: B010 - it is not made to be replaced


if __name__ == "__main__":
    turn_round(int(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
