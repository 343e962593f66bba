"""The server's part of a model that it does not step: frozen parameters, and buffers as the workers' are.

Buffers come before the commit of a push, and count once control has accepted it. What the job has is the
mean over those of the newest collection, weighted by the samples of their pushes, and taken when somebody
wants it. So buffers do not affect a mode, and nobody waits for them. The conductor pins the mean as it has a
version evaluated: the evaluator takes exactly that (`GetState`), and it is what is saved.

The first worker uploads both with the parameters. Later ones compare a checksum of the frozen parameters, and
take the buffers. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from ...common.stored import stored
from ...proto.entries import of_kind
from ...proto.messages import Entry, EntryKind
from ...proto.state import frozen_digest
from ...proto.transfer import Bytes
from ..job.events import PushKey

PINNED = 2  # epochs
Values = Mapping[str, Bytes]  # by name of their entries


@stored("deposit")
@dataclass(frozen=True, kw_only=True, slots=True)
class Deposit:
    """A worker's buffers. rank, samples: of its push."""

    collection: int
    values: Mapping[str, Bytes]
    rank: int = 0
    samples: int = 0


class ModelState:
    """
    Attributes:
        entries: of the manifest; none before `open`.
        frozen: values by name.
        frozen_digest: SHA-256 over them.
    """

    def __init__(self) -> None:
        self.entries: Sequence[Entry] = ()
        self.frozen: Mapping[str, Bytes] = {}
        self.frozen_digest = b""
        self._buffers: Awaitable[Values] = _done({})  # those of the job
        self._waiting: dict[tuple[str, int], tuple[int, Deposit]] = {}  # by member: the push, and its buffers
        self._counted: dict[str, Deposit] = {}  # by worker, of the newest collection
        self._newest = 0
        self._changed = False  # whether there are others than `_buffers` was made of
        self._pinned: dict[int, tuple[int, Awaitable[Values]]] = {}  # by epoch, and version

    def open(self, entries: Sequence[Entry], values: Mapping[str, Bytes]) -> None:
        """Take over the first worker's: of all entries that have values."""
        self.entries = entries
        names = {entry.name for entry in entries if entry.kind is EntryKind.FROZEN}
        self.frozen = {name: value for name, value in values.items() if name in names}
        self.frozen_digest = frozen_digest(entries, self.frozen)
        self._buffers = _done({name: value for name, value in values.items() if name not in names})

    async def settled(self) -> None:
        """Wait for means that are being taken, also for those that begin meanwhile."""
        while True:
            means = self._buffers, *(values for _, values in self._pinned.values())
            waiting = [each for each in means if isinstance(each, asyncio.Future) and not each.done()]
            if not waiting:
                return
            await asyncio.wait(waiting)

    def image(self) -> dict[str, Any]:
        """All of it but the entries. Nothing may have happened since `settled`."""
        return {
            "frozen": dict(self.frozen),
            "buffers": dict(_result(self._buffers)),
            "waiting": dict(self._waiting),
            "counted": dict(self._counted),
            "newest": self._newest,
            "changed": self._changed,
            "pinned": {
                epoch: (version, dict(_result(values))) for epoch, (version, values) in self._pinned.items()
            },
        }

    def restore(self, entries: Sequence[Entry], image: Mapping[str, Any]) -> None:
        """Go on from an `image`, of a model with these entries."""
        self.entries, self.frozen = entries, image["frozen"]
        self.frozen_digest = frozen_digest(entries, self.frozen)
        self._buffers = _done(image["buffers"])
        self._waiting, self._counted = image["waiting"], image["counted"]
        self._newest, self._changed = image["newest"], image["changed"]
        pinned: dict[int, tuple[int, Values]] = image["pinned"]
        self._pinned = {epoch: (version, _done(values)) for epoch, (version, values) in pinned.items()}

    def put(self, key: PushKey, deposit: Deposit) -> None:
        """A worker's buffers have come. They wait for the decision on their push."""
        self._waiting[key.worker, key.incarnation] = key.seq, deposit

    def decided(self, key: PushKey, *, accepted: bool, rank: int, samples: int) -> None:
        """A push counts or not, and so do its buffers."""
        seq, deposit = self._waiting.get((key.worker, key.incarnation), (0, None))
        if deposit is None or seq > key.seq:
            return
        del self._waiting[key.worker, key.incarnation]
        if seq < key.seq or not accepted or not samples or deposit.collection < self._newest:
            return
        if deposit.collection > self._newest:
            self._newest = deposit.collection
            self._counted.clear()
        self._counted[key.worker] = Deposit(
            collection=deposit.collection, values=deposit.values, rank=rank, samples=samples
        )
        self._changed = True

    def keep(self, known: Callable[[tuple[str, int]], bool]) -> None:
        """Forget what waits of members that are gone."""
        for member in [each for each in self._waiting if not known(each)]:
            del self._waiting[member]

    def newest(self) -> Awaitable[Values]:
        """The job's buffers, by name."""
        if self._changed:
            self._changed = False
            deposits = sorted(self._counted.values(), key=lambda each: each.rank)
            mean = asyncio.to_thread(mean_of, of_kind(self.entries, frozen=False), deposits)
            self._buffers = asyncio.ensure_future(mean)
        return self._buffers

    def pin(self, epoch: int, version: int) -> None:
        """Keep the buffers with which a version is about to be evaluated."""
        if self._pinned.get(epoch, (None, None))[0] == version:
            return
        self._pin(epoch, version, self.newest())

    def evaluated(self, epoch: int, values: Mapping[str, Bytes]) -> None:
        """These are what an epoch is evaluated with: the buffers of the job, from now on."""
        self._buffers = _done(values)
        self._pin(epoch, self._pinned.get(epoch, (-1, None))[0], self._buffers)

    def _pin(self, epoch: int, version: int, values: Awaitable[Values]) -> None:
        self._pinned[epoch] = version, values
        while len(self._pinned) > PINNED:
            del self._pinned[min(self._pinned)]

    def of(self, epoch: int) -> Awaitable[Values]:
        """Return the buffers that an epoch is evaluated with; the newest for 0, or if that is long ago."""
        return self._pinned[epoch][1] if epoch in self._pinned else self.newest()


def mean_of(entries: Sequence[Entry], deposits: Sequence[Deposit]) -> dict[str, Bytes]:
    """The mean of floating-point buffers by samples, taken in float64; of others, such as counters, those of
    the first. Where a worker has a NaN, the others' will do.

    deposits: in order of rank, at least one.
    """
    found: dict[str, Bytes] = {}
    for entry in entries:
        dtype: torch.dtype = getattr(torch, entry.dtype)
        first = deposits[0].values[entry.name]
        if not dtype.is_floating_point or all((each.values[entry.name] == first).all() for each in deposits):
            found[entry.name] = first
            continue
        tensors = [tensor_of(entry, each.values[entry.name]).double() for each in deposits]
        pairs = zip(deposits, tensors, strict=True)
        usable = [(each.samples, tensor) for each, tensor in pairs if not bool(tensor.isnan().any())]
        if not usable:
            found[entry.name] = first
            continue
        total = sum(samples for samples, _ in usable)
        mean = torch.zeros_like(tensors[0])
        for samples, tensor in usable:
            mean += tensor * (samples / total)
        flat = mean.to(dtype).reshape(-1)
        found[entry.name] = flat.view(torch.uint8).numpy()
    return found


def tensor_of(entry: Entry, data: Bytes) -> torch.Tensor:
    """The value of an entry; a copy, which begins where any dtype may."""
    flat: torch.Tensor = torch.from_numpy(data.copy()).view(getattr(torch, entry.dtype))
    return flat.view(entry.shape)


def complete(
    parameters: Mapping[str, torch.Tensor], entries: Sequence[Entry], values: Mapping[str, Bytes]
) -> dict[str, torch.Tensor]:
    """The whole state_dict, of which no two tensors share memory. values: of all entries, by name."""
    tensors = dict(parameters)
    for entry in entries:
        tied = entry.kind is EntryKind.TIED
        tensors[entry.name] = tensors[entry.tied_to].clone() if tied else tensor_of(entry, values[entry.name])
    return tensors


def _done(values: Mapping[str, Bytes]) -> Awaitable[Values]:
    """Return values that can be awaited any number of times."""
    return _Done(values)


def _result(values: Awaitable[Values]) -> Values:
    """Return values that have been awaited before."""
    return values.values if isinstance(values, _Done) else cast("asyncio.Future[Values]", values).result()


class _Done:
    def __init__(self, values: Mapping[str, Bytes]) -> None:
        self.values = values

    def __await__(self) -> Generator[Any, None, Mapping[str, Bytes]]:
        yield from ()
        return self.values
