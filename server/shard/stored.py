"""What has arrived whole, under the keys by which control names it, until it is applied or dropped."""

from __future__ import annotations

from collections.abc import Sequence

from ...compressors import Payload
from ...proto.transfer import Assembly
from ..job.events import CopyKey, PushKey


class Stored:
    """Pushes, compressed as they came: valid payloads in manifest order. Snapshots, still to be checked."""

    def __init__(self) -> None:
        self._pushes: dict[PushKey, Sequence[Payload]] = {}
        self._copies: dict[CopyKey, Assembly] = {}

    def put(self, key: PushKey, payloads: Sequence[Payload]) -> bool:
        """Whether it was not here yet: a duplicate changes nothing."""
        new = key not in self._pushes
        self._pushes.setdefault(key, payloads)
        return new

    def put_copy(self, key: CopyKey, assembly: Assembly) -> None:
        self._copies[key] = assembly

    def take(self, key: PushKey) -> Sequence[Payload]:
        """A push that is being applied, and no longer stored."""
        return self._pushes.pop(key)

    def take_copy(self, key: CopyKey) -> Assembly:
        """A snapshot that is being taken over, and no longer stored."""
        return self._copies.pop(key)

    def drop(self, key: PushKey | CopyKey) -> None:
        """Forget it, if it is here."""
        if isinstance(key, PushKey):
            self._pushes.pop(key, None)
        else:
            self._copies.pop(key, None)

    def __len__(self) -> int:
        return len(self._pushes) + len(self._copies)
