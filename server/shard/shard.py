"""The border between control and the owner of the parameters. Control never sees a tensor; a shard sees no
rule of a job.

A part of a push is *stored* when all of it has come and is valid: `put` gives it to the shard under the key
of its push, by which control names that from then on. Control hears of it once all parts are stored and the
push is committed. An `Apply` that names it applies it, or a `Drop` has it forgotten: each push meets exactly
one of the two.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import numpy as np

from ...compressors import Payload, Plan
from ...compressors.kernels import WARM_UPS
from ...proto.manifest import Manifest
from ...proto.refusal import Refused
from ...proto.transfer import Assembly, encode_chunks
from ..job.events import Apply, CopyKey, PushKey
from .store import DivergedError, Encoded, Float32, Send, Store

T = TypeVar("T")
Build = Callable[[Manifest, Sequence[Float32]], Store]


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Values:
    """All parameters of one version, encoded as chunks."""

    version: int
    chunks: Sequence[bytes]


class Shard:
    """Holds parameters and optimizer state, sums pushes, encodes updates: a store, and one thread that alone
    touches it, whose queue is the promised order.

    What a caller may rely on, and has to keep to:

    - `open` comes first; until it has returned, `manifest` is None and nothing else may be awaited.
    - The awaited methods take effect one after another, in the order in which they were called: a `snapshot`
      called between two `apply` is of the version between them.
    - `put` and `drop` take effect at once. A part that is stored already stays as it is, so that a duplicate
      is harmless; dropping what is not stored does nothing. A key without parts is a push without a gradient.
    - `apply` sums in the order given, so that arrival order has no part in the bits. If it raises, the
      version is that of before, the parameters are its own or, with a lossy downlink, those that the workers
      have, and the job cannot go on.
    - A worker's name is a part of a key and means nothing more to a shard.
    """

    def __init__(self, build: Build) -> None:
        """build: makes the store, on the reducer thread, from initial values, which it copies."""
        self._build = build
        self._store: Store | None = None
        self._pushes: dict[PushKey, dict[int, Sequence[Payload]]] = {}
        self._copies: dict[CopyKey, Assembly] = {}
        self._values = WeakValueDictionary[int, Values]()  # as long as somebody is being sent them
        self._reducer = ThreadPoolExecutor(1, "reducer")
        self._loading: list[Future[None]] = []

    def start(self) -> None:
        """Load what applying takes, while the workers come."""
        # `open` waits for the kernels in the thread's queue: no push is read before they are there.
        self._loading = [self._reducer.submit(load) for load in WARM_UPS]

    def close(self) -> None:
        """Let go of everything. Nothing may be in progress any more."""
        for loading in self._loading:
            loading.cancel()
        self._reducer.shutdown(wait=True)

    @property
    def manifest(self) -> Manifest | None:
        return None if self._store is None else self._store.manifest

    @property
    def plan(self) -> Plan:
        """How the model is divided. Not before `open`."""
        return self._opened.plan

    @property
    def version(self) -> int:
        """Of the parameters; 0 before the first `apply`."""
        return 0 if self._store is None else self._store.version

    @property
    def stored(self) -> int:
        """How many pushes and snapshots wait to be applied or dropped."""
        return len(self._pushes) + len(self._copies)

    async def open(self, manifest: Manifest, values: Assembly, accept: Callable[[], T]) -> T:
        """Take over version 0, unless control has other ideas by the time that it is in place.

        accept: tells control, on the event loop; if it raises, the values are forgotten.
        Returns what it returns. Raises Refused for values that are not finite.
        """

        def build() -> Store:
            return self._build(manifest, [each.data.view(np.float32) for each in values.finish()])

        store = await self._run(build)
        accepted = accept()
        self._store = store
        return accepted

    def put(self, key: PushKey, part: int, payloads: Sequence[Payload]) -> None:
        """Store a part of a push: valid payloads, end to end."""
        self._pushes.setdefault(key, {}).setdefault(part, payloads)

    def payloads(self, key: PushKey) -> list[Payload]:
        """What is stored of a push."""
        return [payload for part in self._pushes.get(key, {}).values() for payload in part]

    def put_copy(self, key: CopyKey, values: Assembly) -> None:
        """Store a worker's snapshot, whose values are still to be checked."""
        self._copies[key] = values

    def drop(self, key: PushKey | CopyKey) -> None:
        """Forget what will not be applied."""
        if isinstance(key, PushKey):
            self._pushes.pop(key, None)
        else:
            self._copies.pop(key, None)

    def apply(self, order: Apply, send: Send) -> Awaitable[int]:
        """Turn version - 1 into version with the pushes that the order names.

        Takes the pushes at once, so that a `drop` of one that comes again finds nothing to forget.

        Args:
            send: is given each part of the update for every worker on the event loop, as soon as there is
            one.

        Returns how many gradients had no effect, because they were too few to be aggregated. Raises
        DivergedError.
        """
        pushes = [self._pushes.pop(each.key) if each.samples else {} for each in order.contributions]
        loop = asyncio.get_running_loop()

        def hand_over(part: Encoded) -> None:
            loop.call_soon_threadsafe(send, part)

        return self._run(self._opened.apply, order, pushes, hand_over)

    async def load(self, key: CopyKey) -> None:
        """Replace the parameters by a stored snapshot. Raises DivergedError if it is not finite."""
        assembly = self._copies.pop(key)
        try:
            values = await asyncio.to_thread(assembly.finish)
        except Refused as refused:  # with pushes it would have been the shard that found out
            raise DivergedError(f"version {key.version}: {refused}") from None
        await self._run(self._opened.load, key.version, values)

    async def relabel(self, version: int) -> None:
        """Call what is here another version."""
        await self._run(self._opened.relabel, version)

    async def snapshot(self) -> list[Encoded]:
        """What every worker has, for one that has none or an old one."""
        return await self._run(self._opened.snapshot)

    async def values(self) -> Values:
        """The parameters, for anyone who asks; several who ask for one version share the chunks."""
        return await self._run(self._encode, self._opened)

    def _encode(self, store: Store) -> Values:
        found = self._values.get(store.version)
        if found is None:
            found = Values(store.version, list(encode_chunks(store.version, store.values())))
            self._values[store.version] = found
        return found

    async def digest(self) -> str:
        """SHA-256 over the values of the parameters."""
        return await self._run(self._opened.sha256)

    async def save(self, path: Path, digest: str, *, finished: bool) -> None:
        """Write the parameters as safetensors. Raises OSError."""
        store = self._opened
        await self._run(lambda: store.save(path, digest, finished=finished))

    @property
    def _opened(self) -> Store:
        assert self._store is not None, "nothing may be awaited before `open`"
        return self._store

    async def _run(self, function: Callable[..., T], *arguments: Any) -> T:
        """On the reducer thread, after everything that was handed to it before."""
        return await asyncio.get_running_loop().run_in_executor(self._reducer, function, *arguments)
