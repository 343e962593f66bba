"""gc-server, with a record of every application: `recording_server FILE ...`, where the rest is gc-server's.

FILE is a sequence of pickles: first the initial parameters, then one entry for each application, as decoded
gradients, so that a test can do the arithmetic itself.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from gradwire.compressors import decode
from gradwire.server.cli import main
from gradwire.server.job.events import Apply
from gradwire.server.shard.making import SteppedStore
from gradwire.server.shard.mean import Push
from gradwire.server.shard.store import Send


def record(path: str) -> None:
    file = open(path, "wb")  # noqa: SIM115 - as long as the process

    def write(entry: Any) -> None:
        pickle.dump(entry, file)
        file.flush()

    def gradients(self: SteppedStore, push: Push) -> list[np.ndarray[Any, Any]]:
        """Return the gradient of each tensor; none for a push without parts."""
        in_order = sorted(push, key=lambda part: self.plan.parts[part].start)
        values = [decode(payload) for part in in_order for payload in push[part]]
        return np.split(np.concatenate(values), self.plan.starts[1:-1]) if values else []

    build, apply = SteppedStore.__init__, SteppedStore.apply

    def recorded_build(self: SteppedStore, *arguments: Any, **named: Any) -> None:
        build(self, *arguments, **named)
        write([value.detach().numpy().copy().reshape(-1) for value in self.parameters])

    def recorded_apply(
        self: SteppedStore,
        order: Apply,
        pushes: Sequence[Push],
        send: Send,
        learning_rates: Sequence[float] = (),
    ) -> int:
        given = zip(order.contributions, pushes, strict=True)
        shares = [(each.samples, gradients(self, push)) for each, push in given]
        write((order.version, order.rate_factor, shares))
        return apply(self, order, pushes, send, learning_rates)

    SteppedStore.__init__ = recorded_build  # type: ignore[method-assign]
    SteppedStore.apply = recorded_apply  # type: ignore[method-assign]


if __name__ == "__main__":
    record(sys.argv[1])
    sys.exit(main(sys.argv[2:]))
