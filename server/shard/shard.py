"""The border between control and the owner of the parameters. Control never sees a tensor; a shard sees no
rule of a job.

The push ledger (`server/streams/push_ledger`) has the parts of pushes until an `Apply` takes them. A shard is
given each part as it is stored (`put`), because a round may be open whose parts are stepped one by one.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import numpy as np
import torch

from ...compressors import Payload, Plan, norm, tell_of_compiling, warm_up
from ...proto.manifest import Manifest
from ...proto.messages import Moment
from ...proto.moments import encode_moments
from ...proto.refusal import Refused
from ...proto.transfer import Assembly, encode_chunks
from ..job.events import Apply, Contribution, Exclude, MemberLost, Open, PushKey, Substitute
from .downlink import LARGEST
from .mean import Push, Share
from .moments import moments_of
from .reports import Applied, Final, Reported
from .store import Complete, Copy, DivergedError, Encoded, Float32, Recall, Send, Store

log = logging.getLogger("gradwire.server")

T = TypeVar("T")
Image = Mapping[str, Any]
Build = Callable[[Manifest, Sequence[Float32], Plan], Store]


@dataclass(frozen=True, slots=True, weakref_slot=True)
class EncodedValues:
    """All parameters of one version, encoded as chunks."""

    version: int
    chunks: Sequence[bytes]


@dataclass(frozen=True, slots=True, weakref_slot=True)
class EncodedMoments:
    """The optimizer's state at one version: a list for a header, and the chunks that follow it."""

    version: int
    listed: Sequence[Moment]
    chunks: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a push in the open round. rates: learning rates that came with it."""

    key: PushKey
    payloads: Sequence[Payload]
    rates: Sequence[float]


@dataclass(slots=True)
class _Round:
    """A round whose parts are stepped one by one.

    members: by assignment, in rank order, as in `Open`. awaited: those that parts wait for. vacant: of these,
    those that are lost, for whom all wait. stored: by part and assignment. final: parts that are stepped, or
    about to be.
    """

    order: Open
    members: dict[int, tuple[str, int, int]]
    awaited: set[int]
    send: Send
    report: Callable[[Final], None]
    vacant: set[int] = field(default_factory=set[int])
    stored: dict[int, dict[int, _Part]] = field(default_factory=dict[int, dict[int, _Part]])
    final: set[int] = field(default_factory=set[int])
    closed: asyncio.Event = field(default_factory=asyncio.Event)


class Shard:
    """Holds parameters and optimizer state, sums pushes, encodes updates: a store, and one thread that alone
    touches it, whose queue is the promised order.

    Orders: 1 `open`, 2 `reopen`, 3 `put`, 4 `drop`, 5 `open_round`, 6 `change_round`, 7 `apply`, 8 `replace`,
    9 `adopt`, 10 `measure_norms`, 11 `undo`; and 12, to read what there is between two versions: `image`,
    `snapshot`, `values`, `moments`, `copy`, `digest`, `save`. Reports: 13 `Final`, 14 each part of an update
    (`send`), 15 `Applied`. Nothing else passes. Of a shard others read `reported` alone, the last reports.

    What a caller may rely on, and has to keep to:

    - `open` comes first; until it has returned, `reported.manifest` is None and nothing else may be awaited.
    - The awaited methods take effect one after another, in the order in which they were called: a `snapshot`
      called between two `apply` is of the version between them.
    - `put`, `drop` and `adopt` take effect at once. A part that a round has already stays as it is, so that a
      duplicate is harmless; dropping what is not there does nothing.
    - `apply` sums in the order given, so that arrival order has no part in the bits. If it raises, the
      version is that of before, the parameters are its own or, with a lossy downlink, those that the workers
      have, and the job cannot go on.
    - `adopt` comes when no push is to be applied. What was called before it goes by the old plan, what is
      called after it by the new one.
    - A worker's name is a part of a key and means nothing more to a shard.
    """

    def __init__(self, build: Build) -> None:
        """build: makes the store, on the reducer thread, from initial values, which it copies."""
        self._build = build
        self._store: Store | None = None
        self.reported = Reported()
        self._round: _Round | None = None
        self._values = WeakValueDictionary[int, EncodedValues]()  # as long as somebody is being sent them
        self._moments = WeakValueDictionary[int, EncodedMoments]()
        self._reducer = ThreadPoolExecutor(1, "reducer")
        self._closing = threading.Event()

    def start(self) -> None:
        """Load what applying takes, while the workers come."""
        # `open` waits for the kernels in the thread's queue: no push is read before they are there.
        self._reducer.submit(self._load_kernels)

    def _load_kernels(self) -> None:
        told: list[str] = []

        def tell(line: str) -> None:
            log.info("%s", line)
            told.append(line)

        tell_of_compiling(tell)
        began = time.monotonic()
        warm_up(self._closing.is_set)
        if told:
            log.info("kernels ready after %.1f s", time.monotonic() - began)

    def close(self) -> None:
        """Let go of everything. Nothing may be in progress any more."""
        self._closing.set()
        self._reducer.shutdown(wait=True)

    async def open(
        self,
        manifest: Manifest,
        values: Assembly,
        plan: Plan,
        accept: Callable[[], T],
        keep: Callable[[Image, Plan], Awaitable[None]] | None = None,
        recall: Recall | None = None,
    ) -> T:
        """Take over version 0, unless control has other ideas by the time that it is in place.

        accept: tells control, on the event loop; if it raises, the values are forgotten.
        keep: is given what `reopen` takes, and awaited before that.
        recall: what the optimizer begins with, besides.
        Returns what it returns. Raises Refused for values that are not finite.
        """

        def build() -> tuple[Store, tuple[float, ...]]:
            arrays = [each.data.view(np.float32) for each in values.finish()]
            norms = tuple(float(np.float32(min(norm(torch.from_numpy(each)), LARGEST))) for each in arrays)
            store = self._build(manifest, arrays, plan)
            if recall is not None:
                store.recall(recall)
            return store, norms

        store, norms = await self._run(build)
        plan = replace(plan, norms=norms)
        if keep is not None:
            await keep(await self._run(store.image), plan)
        accepted = accept()
        self._store = store
        self.reported.manifest, self.reported.plan = manifest, plan
        return accepted

    def image(self) -> Awaitable[Image]:
        """All that the store remembers, as `Store.image` has it."""
        return self._run(self._opened.image)

    async def reopen(self, manifest: Manifest, plan: Plan, image: Image) -> None:
        """Instead of `open`: go on from an `image` that was taken under this plan."""

        def build() -> Store:
            values = [np.zeros(spec.elements, np.float32) for spec in manifest.specs]
            store = self._build(manifest, values, plan)
            store.restore(image)
            return store

        self._store = store = await self._run(build)
        known = self.reported
        known.manifest, known.plan, known.version = manifest, plan, store.version
        known.checked, known.square_norms = store.checked, store.square_norms

    def adopt(self, plan: Plan) -> Awaitable[None]:
        """Divide the model by another plan."""
        assert plan.number == self.reported.plan.number + 1
        assert self._round is None or not self._round.final, "a part of the old plan is stepped"
        self.reported.plan, self._round = plan, None
        return self._run(self._opened.adopt, plan)

    def put(
        self,
        key: PushKey,
        part: int,
        payloads: Sequence[Payload],
        assignment: int = 0,
        learning_rates: Sequence[float] = (),
    ) -> None:
        """Take a stored part of a push: step it, if a round is open in which every member has it now.

        Args:
            payloads: valid, end to end; none where the push contributes nothing to the part.
            assignment: id of the one that the push answers.
            learning_rates: of the step, by parameter group; none for those of the job. All pushes of a round
                have the same.
        """
        if self._round is not None and assignment in self._round.awaited:
            stored = self._round.stored.setdefault(part, {})
            stored.setdefault(assignment, _Part(key, payloads, learning_rates))
            self._step_if_final(self._round, part)

    def open_round(self, order: Open, send: Send, report: Callable[[Final], None]) -> None:
        """From now on step each part as soon as every member of the round has stored it or is given up.

        send: as for `apply`, which closes the round. report: called before each part is stepped.
        """
        members = dict(order.members)
        self._round = _Round(order, members, set(members), self._on_loop(send), report)

    def change_round(self, order: MemberLost | Substitute | Exclude) -> None:
        """Change whom the parts of the open round wait for; without one there is nothing to do.

        After `MemberLost` no part is stepped before each of these slots has a substitute or is given up.
        `Substitute` gives a lost member's slot to a member, which may be the lost one; of a substitute only
        parts count that are not final, and parts that the lost member has stored are discarded. After
        `Exclude` parts do not wait for these; those that are given up together are not stepped with one
        another either.
        """
        round_ = self._round
        if round_ is None:
            return
        match order:
            case MemberLost():
                round_.vacant |= round_.awaited.intersection(order.assignments)
                return
            case Substitute():
                if order.lost not in round_.awaited:
                    return
                round_.vacant.discard(order.lost)
                if order.assignment != order.lost:
                    self._substitute(round_, order)
            case Exclude():
                for assignment in order.assignments:
                    self._forget(round_, assignment)
        for part in list(round_.stored):
            self._step_if_final(round_, part)

    def _substitute(self, round_: _Round, order: Substitute) -> None:
        """Have another member in the place, and in the rank, of a lost one."""
        self._forget(round_, order.lost)
        terms = order.worker, order.incarnation, round_.members[order.lost][2]
        round_.members = {
            (order.assignment if each == order.lost else each): (terms if each == order.lost else others)
            for each, others in round_.members.items()
        }
        round_.awaited.add(order.assignment)

    @staticmethod
    def _forget(round_: _Round, assignment: int) -> None:
        round_.awaited.discard(assignment)
        round_.vacant.discard(assignment)
        for stored in round_.stored.values():
            stored.pop(assignment, None)

    def _step_if_final(self, round_: _Round, part: int) -> None:
        stored = round_.stored.get(part, {})
        if not round_.awaited or part in round_.final or not round_.awaited <= stored.keys():
            return
        if round_.vacant:
            return
        first, last = not round_.final, len(round_.final) == len(self.reported.plan.parts) - 1
        version = round_.order.version
        counting = [
            (rank, samples, stored[assignment])
            for rank, (assignment, (_, _, samples)) in enumerate(round_.members.items())
            if assignment in round_.awaited
        ]
        keys = tuple(found.key for _, _, found in counting)
        round_.report(Final(version=version, part=part, keys=keys, first=first, last=last))
        if first:
            rates = next((each.rates for each in stored.values() if each.rates), ())
            self._submit(self._opened.begin, version, round_.order.rate_factor, rates)
        round_.final.add(part)
        shares: list[Share] = [
            (Contribution(key=found.key, rank=rank, samples=samples, loss=0.0), found.payloads)
            for rank, samples, found in counting
            if found.payloads
        ]
        self._submit(self._opened.add, part, shares, round_.send)

    def _submit(self, function: Callable[..., None], *arguments: Any) -> None:
        self._reducer.submit(function, *arguments)

    def drop(self, key: PushKey) -> None:
        """Forget the parts of a push that have not been stepped."""
        for stored in self._round.stored.values() if self._round is not None else ():
            for assignment in [each for each, other in stored.items() if other.key == key]:
                del stored[assignment]

    def apply(
        self, order: Apply, pushes: Sequence[Push], send: Send, learning_rates: Sequence[float] = ()
    ) -> Awaitable[Applied]:
        """Turn version - 1 into version with the pushes that the order names, and close the open round.

        Args:
            pushes: the parts of each contribution, in their order.
            send: is given each part of the update for every worker on the event loop, as soon as there is
                one.
            learning_rates: as in `put`.

        Raises:
            DivergedError: the parameters are not finite any more.
        """
        self._close_round()
        applying = self._run(self._apply, self._opened, order, pushes, self._on_loop(send), learning_rates)
        return self._then(applying, self.reported.applied)

    @staticmethod
    def _apply(
        store: Store, order: Apply, pushes: Sequence[Push], send: Send, rates: Sequence[float]
    ) -> Applied:
        passed_over = store.apply(order, pushes, send, rates)
        return Applied(
            version=store.version,
            passed_over=passed_over,
            gradient_norm=store.gradient_norm,
            square_norms=store.square_norms,
            checked=store.checked,
        )

    def _close_round(self) -> None:
        if self._round is not None:
            self._round.closed.set()
            self._round = None

    def replace(self, version: int, values: Assembly | None = None) -> Awaitable[None]:
        """Have the parameters be a worker's snapshot, or call those that there are another version.

        Raises:
            DivergedError: the snapshot is not finite.
        """
        if values is not None:
            return self._load(version, values)
        return self._then(self._run(self._opened.relabel, version), lambda _: self._replaced(version))

    async def _load(self, version: int, snapshot: Assembly) -> None:
        try:
            values = await asyncio.to_thread(snapshot.finish)
        except Refused as refused:  # with pushes it would have been the shard that found out
            raise DivergedError(f"version {version}: {refused}") from None
        loading = self._run(self._opened.load, version, values)
        await self._then(loading, lambda _: self._replaced(version))

    def measure_norms(self) -> None:
        """Have `Applied.square_norms` found anew with the next version of which nothing has been stepped."""

        def begin() -> None:
            self._opened.measures_norms = True

        self._submit(begin)

    def _replaced(self, version: int) -> None:
        self.reported.version = version

    def snapshot(self) -> Awaitable[list[Encoded]]:
        """What every worker has, for one that has none or an old one."""
        return self._run(self._opened.snapshot)

    def undo(self) -> Awaitable[None]:
        """Go back to the last version as far as parts of the next one have been stepped, if there is a
        way."""
        return self._run(self._opened.undo)

    def values(self) -> Awaitable[EncodedValues]:
        """The parameters, for anyone who asks; several who ask for one version share the chunks. Waits for a
        round of which parts have been stepped already."""
        if self._round is not None and self._round.final:
            return self._values_after(self._round)
        return self._run(self._encode, self._opened)

    async def _values_after(self, round_: _Round) -> EncodedValues:
        await round_.closed.wait()
        return await self.values()

    def _encode(self, store: Store) -> EncodedValues:
        found = self._values.get(store.version)
        if found is None:
            found = EncodedValues(store.version, list(encode_chunks(store.version, store.values())))
            self._values[store.version] = found
        return found

    async def moments(self) -> EncodedMoments:
        """Return the optimizer's state, for a script that saves it; several that ask for one version share
        the chunks. Waits for a round of which parts have been stepped already."""
        if self._round is not None and self._round.final:
            await self._round.closed.wait()
            return await self.moments()
        return await self._run(self._encode_moments, self._opened)

    def _encode_moments(self, store: Store) -> EncodedMoments:
        found = self._moments.get(store.version)
        if found is None:
            listed, chunks = encode_moments(moments_of(store.remembered(), store.manifest))
            found = EncodedMoments(store.version, listed, list(chunks))
            self._moments[store.version] = found
        return found

    def copy(self) -> Awaitable[Copy]:
        """The parameters, as every worker has them."""
        return self._run(self._opened.copy)

    def digest(self) -> Awaitable[str]:
        """SHA-256 over the values of the parameters."""
        return self._run(self._opened.sha256)

    async def save(self, path: Path, digest: str, *, finished: bool, complete: Complete = dict) -> None:
        """Write the parameters as safetensors, with what `complete` adds to them by name. Raises OSError."""
        store = self._opened
        await self._run(lambda: store.save(path, digest, finished=finished, complete=complete))

    @property
    def _opened(self) -> Store:
        assert self._store is not None, "nothing may be awaited before `open`"
        return self._store

    @staticmethod
    def _then(future: asyncio.Future[T], report: Callable[[T], None]) -> asyncio.Future[T]:
        """Have a report made before anybody who awaits the future continues."""

        def done(found: asyncio.Future[T]) -> None:
            if not found.cancelled() and found.exception() is None:
                report(found.result())

        future.add_done_callback(done)
        return future

    def _run(self, function: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        """On the reducer thread, after everything that was handed to it before."""
        return asyncio.get_running_loop().run_in_executor(self._reducer, function, *arguments)

    @staticmethod
    def _on_loop(send: Send) -> Send:
        """The same on the event loop that runs here, called from another thread."""
        loop = asyncio.get_running_loop()

        def forward(part: Encoded) -> None:
            loop.call_soon_threadsafe(send, part)

        return forward
