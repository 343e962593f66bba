"""Updates of the replicas while they grow, part by part; the same messages go to everybody."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..shard.store import Encoded


class Broadcast:
    """An update to a version. Parts are added while others are being sent.

    Attributes:
        parts: so far.
        complete: whether there will be no more.
        last_first: of parts that wait to be sent, the last of the plan goes first, which is nearest to the
            model's input; otherwise they go as they come.
    """

    def __init__(self, version: int, *, last_first: bool = False) -> None:
        self.version = version
        self.last_first = last_first
        self.complete = False
        self.parts: list[Encoded] = []
        self._listeners: list[Callable[[], None]] = []

    def add(self, part: Encoded) -> None:
        self.parts.append(part)
        self._tell()

    def finish(self, parts: Sequence[Encoded] = ()) -> None:
        """There will be no more but these."""
        for part in parts:
            self.add(part)
        self.complete = True
        self._tell()
        self._listeners.clear()

    def listen(self, listener: Callable[[], None]) -> None:
        """Have a listener called whenever there is more."""
        if not self.complete:
            self._listeners.append(listener)

    def _tell(self) -> None:
        for listener in self._listeners:
            listener()

    @property
    def messages(self) -> list[bytes]:
        """So far, as they have come."""
        return [message for part in self.parts for message in part.messages]

    @property
    def whole(self) -> bool:
        """Whether a replica at any version can take it in. Of a complete one."""
        return all(part.whole for part in self.parts)

    @property
    def raw_bytes(self) -> int:
        """Bytes of its elements as float32."""
        return sum(part.raw_bytes for part in self.parts)

    @property
    def wire_bytes(self) -> int:
        """Bytes of its messages, without gRPC's frames."""
        return sum(len(message) for part in self.parts for message in part.messages)
