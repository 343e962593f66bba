"""gc-worker, on a line that damages one in EVERY chunks of coded packets: `damaging_worker EVERY ...`, where
the rest is gc-worker's."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from gradwire.proto import messages as m
from gradwire.proto.transfer import Pack
from gradwire.worker.cli import main
from gradwire.worker.session.sending import Transfer


def damage(every: int) -> None:
    messages = Transfer.messages
    chunks = 0

    def damaged(self: Transfer, pack: Pack) -> Iterator[bytes]:
        nonlocal chunks
        header, *rest = messages(self, pack)
        yield header
        for chunk in rest:
            if isinstance(self.header, m.Packet):
                chunks += 1
                if chunks % every == 0:
                    middle = len(chunk) // 2
                    chunk = chunk[:middle] + bytes([chunk[middle] ^ 1]) + chunk[middle + 1 :]
            yield chunk

    Transfer.messages = damaged  # type: ignore[method-assign]


if __name__ == "__main__":
    damage(int(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
