"""The border between control and the owner of the parameters. Control never sees a tensor; a shard sees no
rule of a job.

A part of a push is *stored* when all of it has come and is valid: `put` gives it to the shard under the key
of its push, by which control names that from then on. Control hears of it once all parts are stored and the
push is committed. An `Apply` that names it applies it, or a `Drop` has it forgotten: each push meets exactly
one of the two.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import numpy as np
import torch

from ...compressors import Payload, Plan, norm
from ...compressors.kernels import WARM_UPS
from ...proto.manifest import Manifest
from ...proto.plans import plan_message, plan_of
from ...proto.refusal import Refused
from ...proto.transfer import Assembly, encode_chunks
from ..job.events import Apply, Contribution, CopyKey, Open, PushKey
from .downlink import LARGEST
from .mean import Push, Share
from .store import Complete, Copy, DivergedError, Encoded, Float32, Recall, Send, Store

log = logging.getLogger("gradwire.server")

T = TypeVar("T")
COMPILING_AFTER_S = 5.0
COMPILING = (
    "compiling kernels, as the first start after an installation does, for a minute or so; the parameters "
    "are taken when that is done"
)
COUNTED_REMEMBERED = 1024  # pushes of lost members of which parts count
Image = Mapping[str, Any]
Build = Callable[[Manifest, Sequence[Float32], Plan], Store]


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Values:
    """All parameters of one version, encoded as chunks."""

    version: int
    chunks: Sequence[bytes]


@dataclass(slots=True)
class _Round:
    """A round whose parts are stepped one by one.

    members: by assignment, in rank order, as in `Open`. awaited: those that parts wait for. vacant: of these,
    those that are lost, for whom all wait. asked: parts that a member is to push who has taken another's
    place. stored: by part and assignment, the push that has it. final: parts that are stepped, or about to
    be.
    """

    order: Open
    members: dict[int, tuple[str, int, int]]
    awaited: set[int]
    send: Send
    begun: Callable[[bool], None]
    vacant: set[int] = field(default_factory=set[int])
    asked: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    stored: dict[int, dict[int, PushKey]] = field(default_factory=dict[int, dict[int, PushKey]])
    final: set[int] = field(default_factory=set[int])
    closed: asyncio.Event = field(default_factory=asyncio.Event)


class Shard:
    """Holds parameters and optimizer state, sums pushes, encodes updates: a store, and one thread that alone
    touches it, whose queue is the promised order.

    What a caller may rely on, and has to keep to:

    - `open` comes first; until it has returned, `manifest` is None and nothing else may be awaited.
    - The awaited methods take effect one after another, in the order in which they were called: a `snapshot`
      called between two `apply` is of the version between them.
    - `put`, `drop` and `adopt` take effect at once. A part that is stored already stays as it is, so that a
      duplicate is harmless; dropping what is not stored does nothing. A key without parts is a push without a
      gradient.
    - `apply` sums in the order given, so that arrival order has no part in the bits. If it raises, the
      version is that of before, the parameters are its own or, with a lossy downlink, those that the workers
      have, and the job cannot go on.
    - `adopt` comes when no push is to be applied: it forgets all that are stored. What was called before it
      goes by the old plan, what is called after it by the new one.
    - A worker's name is a part of a key and means nothing more to a shard.
    """

    def __init__(self, build: Build) -> None:
        """build: makes the store, on the reducer thread, from initial values, which it copies."""
        self._build = build
        self._store: Store | None = None
        self._plan: Plan | None = None
        self._next: Plan | None = None
        self._pushes: dict[PushKey, dict[int, Sequence[Payload]]] = {}
        self._rates: dict[PushKey, Sequence[float]] = {}  # of those that come with learning rates
        self._copies: dict[CopyKey, Assembly] = {}
        self._round: _Round | None = None
        self._counted: dict[PushKey, set[int]] = {}  # of pushes that are not applied, or not yet
        self._values = WeakValueDictionary[int, Values]()  # as long as somebody is being sent them
        self._reducer = ThreadPoolExecutor(1, "reducer")
        self._loading: list[Future[None]] = []

    def start(self) -> None:
        """Load what applying takes, while the workers come."""
        # `open` waits for the kernels in the thread's queue: no push is read before they are there.
        self._loading = [self._reducer.submit(load) for load in WARM_UPS]
        saying = threading.Timer(COMPILING_AFTER_S, log.info, (COMPILING,))
        saying.daemon = True
        saying.start()
        for loading in self._loading[-1:]:
            loading.add_done_callback(lambda _: saying.cancel())

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
        assert self._plan is not None, "nothing may be asked for before `open`"
        return self._plan

    @property
    def version(self) -> int:
        """Of the parameters; 0 before the first `apply`."""
        return 0 if self._store is None else self._store.version

    @property
    def stored(self) -> int:
        """How many pushes and snapshots wait to be applied or dropped."""
        return len(self._pushes) + len(self._copies)

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
        self._store, self._plan = store, plan
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

        self._store = await self._run(build)
        self._plan = plan

    @property
    def pushes(self) -> Mapping[PushKey, Mapping[int, Sequence[Payload]]]:
        """What is stored of pushes that are neither applied nor dropped, by part."""
        return self._pushes

    def rates(self, key: PushKey) -> Sequence[float]:
        """Learning rates that came with a push; none for those of the job."""
        return self._rates.get(key, ())

    @property
    def steps_parts(self) -> bool:
        """Whether a round is open whose parts are stepped one by one."""
        return self._round is not None

    @property
    def late(self) -> Mapping[PushKey, Collection[int]]:
        """Parts that count of pushes that were never applied as a whole, for `counts`."""
        return self._counted

    def counts(self, late: Mapping[PushKey, Collection[int]]) -> None:
        """Go on with what `late` was."""
        self._counted = {key: set(parts) for key, parts in late.items()}

    @property
    def prepared(self) -> Plan | None:
        """The plan that is ready."""
        return self._next

    def prepare(self, plan: Plan) -> None:
        """Have a plan ready under the next number. Raises Refused: PLAN, if the model cannot have it."""
        assert self.manifest is not None, "there is nothing to divide before `open`"
        self._next = plan_of(
            plan_message(replace(plan, number=self.plan.number + 1, norms=self.plan.norms)), self.manifest
        )

    def adopt(self, number: int) -> Awaitable[None]:
        """Divide the model by the plan that is ready."""
        assert self._next is not None
        assert self._next.number == number
        assert self._round is None or not self._round.final, "a part of the old plan is stepped"
        self._plan, self._next, self._round = self._next, None, None
        self._pushes.clear()
        self._rates.clear()
        return self._run(self._opened.adopt, self._plan)

    def put(
        self,
        key: PushKey,
        part: int,
        payloads: Sequence[Payload],
        assignment: int = 0,
        learning_rates: Sequence[float] = (),
    ) -> None:
        """Store a part of a push: valid payloads, end to end, or none at all where it contributes nothing.

        Args:
            assignment: that the push answers; of a round that is open, the part may be stepped at once.
            learning_rates: of the step that the push is for, by parameter group; none for those of the job.
                Pushes that are applied together have the same ones.
        """
        self._pushes.setdefault(key, {}).setdefault(part, payloads)
        if learning_rates:
            self._rates[key] = learning_rates
        if self._round is not None and assignment in self._round.awaited:
            self._round.stored.setdefault(part, {}).setdefault(assignment, key)
            self._step_if_final(self._round, part)

    def open_round(self, order: Open, send: Send, begun: Callable[[bool], None]) -> None:
        """From now on step each part as soon as every member of the round has stored it or is given up.

        send: as for `apply`, which closes the round. begun: called before the first part is stepped, and the
        last one, with whether it is that.
        """
        members = dict(order.members)
        self._round = _Round(order, members, set(members), self._on_loop(send), begun)

    def vacate(self, assignments: Collection[int]) -> None:
        """Step nothing more of the round that is open until each of these has been refilled or given up."""
        if self._round is not None:
            self._round.vacant |= self._round.awaited.intersection(assignments)

    def refill(self, lost: int, assignment: int, member: tuple[str, int]) -> None:
        """A vacant place of the round that is open is a member's: the same one's, or another's, who is to
        push what is not stepped. What is stored of the one before counts no more."""
        round_ = self._round
        if round_ is None or lost not in round_.awaited:
            return
        round_.vacant.discard(lost)
        if assignment != lost:
            self._forget(round_, lost)
            samples = round_.members[lost][2]
            round_.members = {
                (assignment if each == lost else each): ((*member, samples) if each == lost else terms)
                for each, terms in round_.members.items()
            }
            round_.awaited.add(assignment)
            missing = [part for part in range(len(self.plan.parts)) if part not in round_.final]
            round_.asked[assignment] = tuple(missing)
        self._step_what_is_final(round_)

    def without(self, assignments: Collection[int]) -> None:
        """Parts of the round that is open do not wait for these. Nothing is stepped of those that are given
        up together, also not with one another."""
        if self._round is not None:
            for assignment in assignments:
                self._forget(self._round, assignment)
            self._step_what_is_final(self._round)

    def asked(self, assignment: int) -> tuple[int, ...]:
        """Parts to push of who has taken a lost member's place, ascending; none of anybody else."""
        return () if self._round is None else self._round.asked.get(assignment, ())

    @staticmethod
    def _forget(round_: _Round, assignment: int) -> None:
        round_.awaited.discard(assignment)
        round_.vacant.discard(assignment)
        for stored in round_.stored.values():
            stored.pop(assignment, None)

    def _step_what_is_final(self, round_: _Round) -> None:
        for part in list(round_.stored):
            self._step_if_final(round_, part)

    def _step_if_final(self, round_: _Round, part: int) -> None:
        stored = round_.stored.get(part, {})
        if not round_.awaited or part in round_.final or not round_.awaited <= stored.keys():
            return
        if round_.vacant:
            return
        first, whole = not round_.final, len(round_.final) == len(self.plan.parts) - 1
        if first or whole:
            round_.begun(whole)
        if first:
            rates = self._rates_of(stored.values())
            self._submit(self._opened.begin, round_.order.version, round_.order.rate_factor, rates)
        round_.final.add(part)
        shares: list[Share] = []
        for rank, (assignment, (_, _, samples)) in enumerate(round_.members.items()):
            key = stored.get(assignment)
            if assignment in round_.awaited and key is not None:
                self._counted.setdefault(key, set()).add(part)
                payloads = self._pushes[key][part]
                if payloads:
                    share = Contribution(key=key, rank=rank, samples=samples, loss=0.0)
                    shares.append((share, payloads))
        self._submit(self._opened.add, part, shares, round_.send)

    def _submit(self, function: Callable[..., None], *arguments: Any) -> None:
        self._reducer.submit(function, *arguments)

    def _rates_of(self, keys: Iterable[PushKey]) -> Sequence[float]:
        """That came with the first of these that has any."""
        return next((self._rates[key] for key in keys if key in self._rates), ())

    def counted(self, key: PushKey) -> frozenset[int]:
        """Parts of a push that are in a version although the push as a whole was never applied."""
        return frozenset(self._counted.get(key, ()))

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
            self._rates.pop(key, None)
            for stored in self._round.stored.values() if self._round is not None else ():
                for assignment in [each for each, other in stored.items() if other == key]:
                    del stored[assignment]
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
        rates = self._rates_of(each.key for each in order.contributions if each.samples)
        return self._run(self._opened.apply, order, self._taken(order), self._on_loop(send), rates)

    def _taken(self, order: Apply) -> list[Push]:
        """The pushes that an order names, which are stored no longer; its round is closed."""
        named = order.contributions
        pushes: list[Push] = [self._pushes.pop(each.key) if each.samples else {} for each in named]
        for each in order.contributions:
            self._counted.pop(each.key, None)
            self._rates.pop(each.key, None)
        while len(self._counted) > COUNTED_REMEMBERED:
            del self._counted[next(iter(self._counted))]
        if self._round is not None:
            self._round.closed.set()
            self._round = None
        return pushes

    async def load(self, key: CopyKey) -> None:
        """Replace the parameters by a stored snapshot. Raises DivergedError if it is not finite."""
        assembly = self._copies.pop(key)
        try:
            values = await asyncio.to_thread(assembly.finish)
        except Refused as refused:  # with pushes it would have been the shard that found out
            raise DivergedError(f"version {key.version}: {refused}") from None
        await self._run(self._opened.load, key.version, values)

    def measure_norms(self) -> None:
        """Have `square_norms` found anew with the next version of which nothing has been stepped."""

        def begin() -> None:
            self._opened.measures_norms = True

        self._submit(begin)

    @property
    def square_norms(self) -> tuple[float, ...]:
        """Of the mean gradient of each tensor, at the last version at which they were measured; empty before
        that."""
        return self._opened.square_norms

    @property
    def checked(self) -> tuple[int, int]:
        """The last version at which a checksum of what every worker has was taken, and that; or (0, 0)."""
        return self._opened.checked

    @property
    def gradient_norm(self) -> float:
        """Of the mean gradient of the last version, before it was clipped; NaN if it never is."""
        return self._opened.gradient_norm

    def relabel(self, version: int) -> Awaitable[None]:
        """Call what is here another version."""
        return self._run(self._opened.relabel, version)

    def snapshot(self) -> Awaitable[list[Encoded]]:
        """What every worker has, for one that has none or an old one."""
        return self._run(self._opened.snapshot)

    def undo(self) -> Awaitable[None]:
        """Go back to the last version as far as parts of the next one have been stepped, if there is a
        way."""
        return self._run(self._opened.undo)

    def values(self) -> Awaitable[Values]:
        """The parameters, for anyone who asks; several who ask for one version share the chunks. Waits for a
        round of which parts have been stepped already."""
        if self._round is not None and self._round.final:
            return self._values_after(self._round)
        return self._run(self._encode, self._opened)

    async def _values_after(self, round_: _Round) -> Values:
        await round_.closed.wait()
        return await self.values()

    def _encode(self, store: Store) -> Values:
        found = self._values.get(store.version)
        if found is None:
            found = Values(store.version, list(encode_chunks(store.version, store.values())))
            self._values[store.version] = found
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

    def _run(self, function: Callable[..., T], *arguments: Any) -> Awaitable[T]:
        """On the reducer thread, after everything that was handed to it before."""
        return asyncio.get_running_loop().run_in_executor(self._reducer, function, *arguments)

    @staticmethod
    def _on_loop(send: Send) -> Send:
        """The same on the event loop that runs here, called from another thread."""
        loop = asyncio.get_running_loop()

        def forward(part: Encoded) -> None:
            loop.call_soon_threadsafe(send, part)

        return forward
