"""The border between control and the owner of the parameters. Control never sees a tensor; a shard sees no
rule of a job.

A push is *stored* when all of it has come and is valid: `put` gives it to the shard under its key, by which
control names it from then on. Only then does control hear of it. An `Apply` that names it applies it, or a
`Drop` has it forgotten: each stored push meets exactly one of the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from ...compressors import Payload
from ...proto.manifest import Manifest
from ...proto.transfer import Assembly
from ..job.events import Apply, CopyKey, PushKey
from .store import Broadcast

T = TypeVar("T")


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Values:
    """All parameters of one version, encoded as chunks."""

    version: int
    chunks: Sequence[bytes]


class Shard(Protocol):
    """Holds parameters and optimizer state, sums pushes, encodes updates.

    What a caller may rely on, and has to keep to:

    - `open` comes first; until it has returned, `manifest` is None and nothing else may be awaited.
    - The awaited methods take effect one after another, in the order in which they were called: a `snapshot`
      called between two `apply` is of the version between them.
    - `put` and `drop` take effect at once. A key that is stored already stays as it is, so that a duplicate
      is harmless; dropping what is not stored does nothing.
    - `apply` sums in the order given, so that arrival order has no part in the bits. If it raises, parameters
      and version are those of before, and the job cannot go on.
    - A worker's name is a part of a key and means nothing more to a shard.

    Attributes:
        manifest: of the tensors, None before `open`.
        version: of the parameters; 0 before the first `apply`.
    """

    @property
    def manifest(self) -> Manifest | None: ...

    @property
    def version(self) -> int: ...

    def start(self) -> None:
        """Load what applying takes, while the workers come."""
        ...

    def close(self) -> None:
        """Let go of everything. Nothing may be in progress any more."""
        ...

    async def open(self, manifest: Manifest, values: Assembly, accept: Callable[[], T]) -> T:
        """Take over version 0, unless control has other ideas by the time that it is in place.

        accept: tells control, on the event loop; if it raises, the values are forgotten.
        Returns what it returns. Raises Refused for values that are not finite.
        """
        ...

    def put(self, key: PushKey, payloads: Sequence[Payload]) -> bool:
        """Store a push: valid payloads in manifest order. Returns whether it was not stored before."""
        ...

    def put_copy(self, key: CopyKey, values: Assembly) -> None:
        """Store a worker's snapshot, whose values are still to be checked."""
        ...

    def drop(self, key: PushKey | CopyKey) -> None:
        """Forget what will not be applied."""
        ...

    async def apply(self, order: Apply) -> Broadcast:
        """Turn version - 1 into version with the pushes that the order names.

        Returns the update for every worker. Raises DivergedError.
        """
        ...

    async def load(self, key: CopyKey) -> None:
        """Replace the parameters by a stored snapshot. Raises DivergedError if it is not finite."""
        ...

    async def relabel(self, version: int) -> None:
        """Call what is here another version."""
        ...

    async def snapshot(self) -> Broadcast:
        """What every worker has, for one that has none or an old one."""
        ...

    async def values(self) -> Values:
        """The parameters, for anyone who asks; several who ask for one version share the chunks."""
        ...

    async def digest(self) -> str:
        """SHA-256 over the values of the parameters."""
        ...

    async def save(self, path: Path, digest: str, *, finished: bool) -> None:
        """Write the parameters as safetensors. Raises OSError."""
        ...
