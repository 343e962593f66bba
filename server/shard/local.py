"""The shard in the server's process: a store, and the one thread that touches it. The thread carries out
orders in the order of its queue. `shard` lists the messages, and the rules that hold for every shard.

The push ledger (`server/streams/push_ledger`) keeps the parts of pushes until an `Apply` takes them. A shard
also gets each part as soon as it is stored (`put`), because the parts of an open round are stepped one by
one.

States of a part in the open round:

    | state   | meaning                                                                 | next  |
    |---------|-------------------------------------------------------------------------|-------|
    | awaited | A member that the round awaits has not stored it, or a slot is vacant.   | final |
    | final   | All awaited members have stored it. It is reported (`Final`), then stepped. |    |

Must not happen: a part becomes final twice or is taken back; a part waits for an excluded member.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import numpy as np
import torch

from ...common.parts import Plan
from ...compressors import Payload, norm, tell_of_compiling, warm_up
from ...proto.manifest import Manifest
from ...proto.messages import Moment
from ...proto.moments import encode_moments
from ...proto.refusal import Refused
from ...proto.transfer import Assembly
from ..job.events import Apply, Contribution, Exclude, MemberLost, Open, PushKey, Substitute
from .coordinates import described
from .downlink import LARGEST
from .making import SteppedStore
from .mean import Push, Share
from .moments import moments_of
from .reports import Applied, Final, Reported
from .shard import EncodedValues, Image
from .store import Copy, DivergedError, EarlierBases, Encoded, Float32, Recall, Send

log = logging.getLogger("gradwire.server")

T = TypeVar("T")
Build = Callable[[Manifest, Sequence[Float32], Plan], SteppedStore]


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a push in the open round.

    Attributes:
        payloads: payloads of the part, end to end; empty if the push contributes nothing.
        rates: learning rates that arrived with the part; empty for those of the job.
    """

    key: PushKey
    payloads: Sequence[Payload]
    rates: Sequence[float]


@dataclass(slots=True)
class _Round:
    """A round whose parts are stepped one by one.

    Attributes:
        order: the order that opened the round.
        members: worker, incarnation and samples by assignment, in rank order, substitutes included.
        awaited: assignments for which parts wait.
        send: receives each encoded part of the update.
        report: called before each part is stepped.
        vacant: assignments among `awaited` of lost members; no part is stepped while there are any.
        stored: stored parts by number of the part and assignment.
        final: numbers of the parts that are stepped or about to be.
        closed: set once the round is applied.
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


class LocalShard:
    """The `Shard` in the server's process. The daemon creates it; the conductor and its components use it."""

    def __init__(self, build: Build) -> None:
        """
        Args:
            build: creates the store from initial values (`Store`); runs on the reducer thread."""
        self._build = build
        self._store: SteppedStore | None = None
        self.reported = Reported()
        self._round: _Round | None = None
        self._ordered = 0  # the last version that was ordered, by `apply` or `replace`
        # Encoded values by version and whether they are moments; kept as long as some call still sends them.
        self._values = WeakValueDictionary[tuple[int, bool], EncodedValues]()
        self._reducer = ThreadPoolExecutor(1, "reducer")
        self._closing = threading.Event()

    def start(self) -> None:
        # `open` queues behind this on the thread, so no push is read before the kernels are loaded.
        self._reducer.submit(self._load_kernels)

    def _load_kernels(self) -> None:
        """Compile and load the kernels, and log that if it took time."""
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
        self._closing.set()
        self._reducer.shutdown(wait=True)

    async def open(
        self,
        manifest: Manifest,
        begin: Assembly | Image,
        plan: Plan,
        accept: Callable[[], T],
        keep: Callable[[Image, Plan], Awaitable[None]] | None = None,
        recall: Recall | None = None,
        bases: EarlierBases | None = None,
    ) -> T:
        def build() -> tuple[SteppedStore, Plan]:
            if not isinstance(begin, Assembly):
                store = self._build(manifest, [begin["parameters"].numpy()], plan)
                store.restore(begin)
                return store, plan
            arrays = [each.data.view(np.float32) for each in begin.finish()]
            norms = tuple(float(np.float32(min(norm(torch.from_numpy(each)), LARGEST))) for each in arrays)
            store = self._build(manifest, [begin.data.view(np.float32)], plan)
            if recall is not None:
                store.recall(recall)
            if bases is not None:
                store.recall_bases(bases)
            return store, replace(plan, norms=norms)

        store, plan = await self._run(build)
        if keep is not None:
            await keep(await self._run(store.image), plan)
        accepted = accept()
        if store.bases is not None:
            log.info("%s", described(store.bases, store.stepped, store.downlink))
        self._store, self._ordered = store, store.version
        known = self.reported
        known.manifest, known.plan, known.version = manifest, plan, store.version
        known.checked, known.square_norms = store.checked, store.square_norms
        known.coordinates = {} if store.bases is None else store.bases.counts
        return accepted

    def image(self) -> Awaitable[Image]:
        return self._run(self._opened.image)

    def adopt(self, plan: Plan) -> Awaitable[None]:
        if plan.number <= self.reported.plan.number:
            return self._run(lambda: None)
        assert plan.number == self.reported.plan.number + 1
        assert self._round is None or not self._round.final, (
            "a plan cannot be replaced while a part of the open round is stepped under it"
        )
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
        if self._round is not None and assignment in self._round.awaited:
            stored = self._round.stored.setdefault(part, {})
            stored.setdefault(assignment, _Part(key, payloads, learning_rates))
            self._step_if_final(self._round, part)

    def open_round(self, order: Open, send: Send, report: Callable[[Final], None]) -> None:
        known = self._round
        repeated = known is not None and known.order == order and known.awaited
        if repeated or order.version <= self._ordered:
            return
        members = dict(order.members)
        self._round = _Round(order, members, set(members), self._on_loop(send), report)

    def change_round(self, order: MemberLost | Substitute | Exclude) -> None:
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
        """Give the slot and the rank of a lost member to another member."""
        self._forget(round_, order.lost)
        substitute = order.worker, order.incarnation, round_.members[order.lost][2]
        round_.members = {
            (order.assignment if each == order.lost else each): (substitute if each == order.lost else member)
            for each, member in round_.members.items()
        }
        round_.awaited.add(order.assignment)

    @staticmethod
    def _forget(round_: _Round, assignment: int) -> None:
        """Stop waiting for an assignment, and discard its stored parts."""
        round_.awaited.discard(assignment)
        round_.vacant.discard(assignment)
        for stored in round_.stored.values():
            stored.pop(assignment, None)

    def _step_if_final(self, round_: _Round, part: int) -> None:
        """Report and step a part of the open round if every awaited member has stored it and no slot is
        vacant."""
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
        for stored in self._round.stored.values() if self._round is not None else ():
            for assignment in [each for each, other in stored.items() if other.key == key]:
                del stored[assignment]

    def apply(
        self, order: Apply, pushes: Sequence[Push], send: Send, learning_rates: Sequence[float] = ()
    ) -> Awaitable[Applied]:
        if order.version <= self._ordered:
            return self._run(self._report, self._opened)
        self._ordered = order.version
        self._close_round()
        owned = [pushes]  # so that only the store refers to them
        del pushes
        applying = self._run(self._apply, self._opened, order, owned, self._on_loop(send), learning_rates)
        self._submit(self._opened.settle)  # while the workers get the update
        return self._then(applying, self.reported.applied)

    def _apply(
        self,
        store: SteppedStore,
        order: Apply,
        owned: list[Sequence[Push]],
        send: Send,
        rates: Sequence[float],
    ) -> Applied:
        return self._report(store, store.apply(order, owned.pop(), send, rates))

    @staticmethod
    def _report(store: SteppedStore, passed_over: int = 0) -> Applied:
        """Return the report on the present version."""
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
        if version < self._ordered:
            return self._run(lambda: None)
        self._ordered = version
        if values is not None:
            return self._load(version, values)
        return self._then(self._run(self._opened.relabel, version), lambda _: self._replaced(version))

    async def _load(self, version: int, snapshot: Assembly) -> None:
        """Check a snapshot on another thread, then replace the parameters by it."""
        try:
            values = await asyncio.to_thread(snapshot.finish)
        # Raised for values that are not finite, which means here, too, that the job has diverged.
        except Refused as refused:
            raise DivergedError(f"version {version}: {refused}") from None
        loading = self._run(self._opened.load, version, values)
        await self._then(loading, lambda _: self._replaced(version))

    def _replaced(self, version: int) -> None:
        self.reported.version = version

    def snapshot(self) -> Awaitable[list[Encoded]]:
        return self._run(self._opened.snapshot)

    def values(self, *, moments: bool = False) -> Awaitable[EncodedValues]:
        if self._round is not None and self._round.final:
            return self._values_after(self._round, moments)
        return self._run(self._encode, self._opened, moments)

    async def _values_after(self, round_: _Round, moments: bool) -> EncodedValues:
        """Wait until a round is applied, then return the encoded values."""
        await round_.closed.wait()
        return await self.values(moments=moments)

    def _encode(self, store: SteppedStore, moments: bool) -> EncodedValues:
        """Return the encoded parameters or moments of the present version, which callers share."""
        found = self._values.get((store.version, moments))
        if found is None:
            listed: Sequence[Moment] = ()
            chunks: Iterable[bytes] = ()
            if moments:
                listed, chunks = encode_moments(moments_of(store.remembered(), store.manifest))
            else:
                chunks = store.messages()
            found = self._values[store.version, moments] = EncodedValues(store.version, chunks, listed)
        return found

    def copy(self, *, last: bool = False, undo: bool = False) -> Awaitable[Copy]:
        store = self._opened

        def copy() -> Copy:
            if undo:
                store.undo()
            return store.copy(last=last)

        return self._run(copy)

    @property
    def _opened(self) -> SteppedStore:
        assert self._store is not None, "the shard must be opened before it is used"
        return self._store

    @staticmethod
    def _then(future: asyncio.Future[T], report: Callable[[T], None]) -> asyncio.Future[T]:
        """Have `report` called with the future's result before any coroutine that awaits the future
        continues."""

        def done(found: asyncio.Future[T]) -> None:
            if not found.cancelled() and found.exception() is None:
                report(found.result())

        future.add_done_callback(done)
        return future

    def _run(self, function: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        """Call a function on the reducer thread, after all calls that were queued before, and return its
        future."""
        return asyncio.get_running_loop().run_in_executor(self._reducer, function, *arguments)

    @staticmethod
    def _on_loop(send: Send) -> Send:
        """Return a function for other threads that calls `send` on the running event loop."""
        loop = asyncio.get_running_loop()

        def forward(part: Encoded) -> None:
            loop.call_soon_threadsafe(send, part)

        return forward
