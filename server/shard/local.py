"""The one shard of a job, in the server's own process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import numpy as np

from ...compressors import Payload
from ...compressors.kernels import WARM_UPS
from ...proto.manifest import Manifest
from ...proto.refusal import Refused
from ...proto.transfer import Assembly, encode_chunks
from ..job.events import Apply, CopyKey, PushKey
from .mean import Share
from .shard import Values
from .store import Broadcast, DivergedError, Float32, Step, Store

T = TypeVar("T")
Build = Callable[[Manifest, Sequence[Float32]], Store]


class LocalShard:
    """See `Shard`. A store, and one thread that alone touches it: its queue is the promised order."""

    def __init__(self, build: Build) -> None:
        """
        Args:
            build: makes the store, on the reducer thread, from initial values that it may keep.
        """
        self._build = build
        self._store: Store | None = None
        self._pushes: dict[PushKey, Sequence[Payload]] = {}
        self._copies: dict[CopyKey, Assembly] = {}
        self._values = WeakValueDictionary[int, Values]()  # as long as somebody is being sent them
        self._reducer = ThreadPoolExecutor(1, "reducer")
        self._loading: list[Future[None]] = []

    def start(self) -> None:
        # `open` waits for the kernels in the thread's queue: no push is read before they are there.
        self._loading = [self._reducer.submit(load) for load in WARM_UPS]

    def close(self) -> None:
        for loading in self._loading:
            loading.cancel()
        self._reducer.shutdown(wait=True)

    @property
    def manifest(self) -> Manifest | None:
        return None if self._store is None else self._store.manifest

    @property
    def version(self) -> int:
        return 0 if self._store is None else self._store.version

    @property
    def stored(self) -> int:
        """How many pushes and snapshots wait to be applied or dropped."""
        return len(self._pushes) + len(self._copies)

    async def open(self, manifest: Manifest, values: Assembly, accept: Callable[[], T]) -> T:
        def build() -> Store:
            # Copies, because the optimizer writes to the parameters and the buffer is one for all tensors.
            return self._build(manifest, [each.data.copy().view(np.float32) for each in values.finish()])

        store = await self._run(build)
        accepted = accept()
        self._store = store
        return accepted

    def put(self, key: PushKey, payloads: Sequence[Payload]) -> bool:
        new = key not in self._pushes
        self._pushes.setdefault(key, payloads)
        return new

    def put_copy(self, key: CopyKey, values: Assembly) -> None:
        self._copies[key] = values

    def drop(self, key: PushKey | CopyKey) -> None:
        if isinstance(key, PushKey):
            self._pushes.pop(key, None)
        else:
            self._copies.pop(key, None)

    async def apply(self, order: Apply) -> Broadcast:
        shares = [
            Share(
                each.samples,
                self._pushes.pop(each.key),
                slice=each.slice,
                slices=each.slices,
                whole=each.whole,
                weight=each.weight,
            )
            for each in order.contributions
        ]
        step = Step(
            version=order.version,
            shares=shares,
            rate_factor=order.rate_factor,
            weight=order.weight,
            base_version=order.base_version,
            bases=order.bases,
        )
        return await self._run(self._opened.apply, step)

    async def load(self, key: CopyKey) -> None:
        assembly = self._copies.pop(key)
        try:
            values = await asyncio.to_thread(assembly.finish)
        except Refused as refused:  # with pushes it would have been the shard that found out
            raise DivergedError(f"version {key.version}: {refused}") from None
        await self._run(self._opened.load, key.version, values)

    async def relabel(self, version: int) -> None:
        await self._run(self._opened.relabel, version)

    async def snapshot(self) -> Broadcast:
        return await self._run(self._opened.snapshot)

    async def values(self) -> Values:
        return await self._run(self._encode, self._opened)

    def _encode(self, store: Store) -> Values:
        found = self._values.get(store.version)
        if found is None:
            found = Values(store.version, list(encode_chunks(store.version, store.values())))
            self._values[store.version] = found
        return found

    async def digest(self) -> str:
        return await self._run(self._opened.sha256)

    async def save(self, path: Path, digest: str, *, finished: bool) -> None:
        store = self._opened
        await self._run(lambda: store.save(path, digest, finished=finished))

    @property
    def _opened(self) -> Store:
        assert self._store is not None, "nothing may be awaited before `open`"
        return self._store

    async def _run(self, function: Callable[..., T], *arguments: Any) -> T:
        """On the reducer thread, after everything that was handed to it before."""
        return await asyncio.get_running_loop().run_in_executor(self._reducer, function, *arguments)
