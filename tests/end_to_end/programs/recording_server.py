"""gc-server, with a record of every application: `recording_server FILE ...`, where the rest is gc-server's.

FILE is a sequence of pickles: first the initial parameters, then one entry for each application, as decoded
gradients, so that a test can do the arithmetic itself.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from typing import Any

from gradwire.compressors import Payload, decode
from gradwire.server.cli import main
from gradwire.server.job.events import Apply
from gradwire.server.shard import store


def record(path: str) -> None:
    file = open(path, "wb")  # noqa: SIM115 - as long as the process

    def write(entry: Any) -> None:
        pickle.dump(entry, file)
        file.flush()

    build, apply = store.Store.__init__, store.Store.apply

    def recorded_build(self: store.Store, *arguments: Any, **named: Any) -> None:
        build(self, *arguments, **named)
        write([value.detach().numpy().copy().reshape(-1) for value in self.parameters])

    def recorded_apply(
        self: store.Store, order: Apply, pushes: Sequence[Sequence[Payload]]
    ) -> store.Broadcast:
        given = zip(order.contributions, pushes, strict=True)
        shares = [(part.samples, [decode(payload) for payload in payloads]) for part, payloads in given]
        write((order.version, order.rate_factor, shares))
        return apply(self, order, pushes)

    store.Store.__init__ = recorded_build  # type: ignore[method-assign]
    store.Store.apply = recorded_apply  # type: ignore[method-assign]


if __name__ == "__main__":
    record(sys.argv[1])
    sys.exit(main(sys.argv[2:]))
