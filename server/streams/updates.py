"""Updates of the replicas while they grow part by part. Every worker gets the same messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..shard.store import Encoded


class Broadcast:
    """An update to one version, or a snapshot of it. Parts are added while earlier parts are being sent.

    Attributes:
        parts: parts that have been added so far.
        complete: whether no other part will be added.
        last_first: whether the waiting part with the highest number, nearest to the model's input, is sent
            first; otherwise parts are sent in the order in which they were added.
    """

    def __init__(self, version: int, *, last_first: bool = False) -> None:
        self.version = version
        self.last_first = last_first
        self.complete = False
        self.parts: list[Encoded] = []
        self._listeners: list[Callable[[], None]] = []

    def add(self, part: Encoded) -> None:
        """Add a part, and call the listeners."""
        self.parts.append(part)
        self._tell()

    def finish(self, parts: Sequence[Encoded] = ()) -> None:
        """Add the last parts, and mark the update as complete."""
        for part in parts:
            self.add(part)
        self.complete = True
        self._tell()
        self._listeners.clear()

    def listen(self, listener: Callable[[], None]) -> None:
        """Have `listener` called after each added part, and after the end."""
        if not self.complete:
            self._listeners.append(listener)

    def _tell(self) -> None:
        for listener in self._listeners:
            listener()

    @property
    def messages(self) -> list[bytes]:
        """Encoded messages of the parts so far, in the order in which the parts were added."""
        return [message for part in self.parts for message in part.messages]

    @property
    def whole(self) -> bool:
        """Whether a replica at any version can take the update. Valid once it is complete."""
        return all(part.whole for part in self.parts)

    @property
    def raw_bytes(self) -> int:
        """Bytes of the elements in this update, as float32."""
        return sum(part.raw_bytes for part in self.parts)

    @property
    def payload_bytes(self) -> int:
        """Bytes of the payloads in this update, before packing."""
        return sum(part.payload_bytes for part in self.parts)

    @property
    def wire_bytes(self) -> int:
        """Bytes of the encoded messages, without gRPC's frames."""
        return sum(map(len, self.messages))
