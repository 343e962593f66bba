"""The model's tensors that the server does not step: frozen parameters, and buffers, which change at the
workers.

A worker's buffers arrive before the commit of a push, and count once control has accepted that push. The
job's buffers are the mean over the newest collection, weighted by the samples of the pushes, and computed on
demand. Buffers therefore do not affect any mode, and no worker waits for them. The conductor pins the mean
when it has a version evaluated. The evaluator takes exactly the pinned values (`GetState`), and files of the
model hold them.

The first worker uploads frozen parameters and buffers with the parameters. Later workers compare a checksum
of the frozen parameters, and download the buffers. All of this belongs to one event loop.
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
from ...proto.state import bytes_of, frozen_digest, tensor_of
from ...proto.transfer import Bytes
from ..job.events import PushKey

PINNED = 2  # most epochs whose evaluated buffers are kept
Values = Mapping[str, Bytes]  # bytes by name of the entry


@stored("deposit")
@dataclass(frozen=True, kw_only=True, slots=True)
class Deposit:
    """One worker's buffers that arrived with a push.

    Attributes:
        collection: number of the collection of buffers to which the server asked the worker to contribute.
        values: bytes of each buffer, by name of its entry.
        samples: number of samples in the push: the weight in the mean.
    """

    collection: int
    values: Mapping[str, Bytes]
    rank: int = 0
    samples: int = 0


class ModelState:
    """Frozen parameters and buffers of the job's model. The conductor owns it.

    Attributes:
        frozen: bytes of the frozen parameters, by name.
        frozen_digest: SHA-256 of the frozen parameters.
    """

    def __init__(self) -> None:
        self.entries: Sequence[Entry] = ()
        self.frozen: Mapping[str, Bytes] = {}
        self.frozen_digest = b""
        self._buffers: Awaitable[Values] = _done({})  # the job's buffers
        # By member: seq of the push, and its buffers.
        self._waiting: dict[tuple[str, int], tuple[int, Deposit]] = {}
        self._counted: dict[str, Deposit] = {}  # buffers of the newest collection, by worker
        self._newest = 0
        self._changed = False  # whether `_counted` has changed since `_buffers` was computed
        self._pinned: dict[int, tuple[int, Awaitable[Values]]] = {}  # by epoch: version and buffers

    def open(self, entries: Sequence[Entry], values: Mapping[str, Bytes]) -> None:
        """Begin with the first worker's frozen parameters and buffers. values: bytes of each entry that has
        values of its own, by name."""
        self.entries = entries
        names = {entry.name for entry in entries if entry.kind is EntryKind.FROZEN}
        self.frozen = {name: value for name, value in values.items() if name in names}
        self.frozen_digest = frozen_digest(entries, self.frozen)
        self._buffers = _done({name: value for name, value in values.items() if name not in names})

    async def settled(self) -> None:
        """Wait until all means of buffers are computed, including those that begin during the wait."""
        while True:
            means = self._buffers, *(values for _, values in self._pinned.values())
            waiting = [each for each in means if isinstance(each, asyncio.Future) and not each.done()]
            if not waiting:
                return
            await asyncio.wait(waiting)

    def image(self) -> dict[str, Any]:
        """Return the complete state without the entries, as plain values. Call it directly after `settled`,
        before anything changes."""
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
        """Replace the state by one that `image` returned, for a model with these entries."""
        self.entries, self.frozen = entries, image["frozen"]
        self.frozen_digest = frozen_digest(entries, self.frozen)
        self._buffers = _done(image["buffers"])
        self._waiting, self._counted = image["waiting"], image["counted"]
        self._newest, self._changed = image["newest"], image["changed"]
        pinned: dict[int, tuple[int, Values]] = image["pinned"]
        self._pinned = {epoch: (version, _done(values)) for epoch, (version, values) in pinned.items()}

    def put(self, key: PushKey, deposit: Deposit) -> None:
        """Store the buffers that arrived with a push until `decided` says whether the push counts."""
        self._waiting[key.worker, key.incarnation] = key.seq, deposit

    def decided(self, key: PushKey, *, accepted: bool, rank: int, samples: int) -> None:
        """Count the buffers of a push if control accepted it and they belong to the newest collection;
        otherwise discard them. samples: number of its samples; with 0 the buffers are discarded."""
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
        """Discard undecided buffers of members for which `known` returns False. known: is called with
        (worker, incarnation)."""
        for member in [each for each in self._waiting if not known(each)]:
            del self._waiting[member]

    def newest(self) -> Awaitable[Values]:
        """Return an awaitable of the job's current buffers, by name. Starts to compute their mean if newer
        ones have been counted."""
        if self._changed:
            self._changed = False
            deposits = sorted(self._counted.values(), key=lambda each: each.rank)
            mean = asyncio.to_thread(mean_of, of_kind(self.entries, frozen=False), deposits)
            self._buffers = asyncio.ensure_future(mean)
        return self._buffers

    def pin(self, epoch: int, version: int) -> None:
        """Keep the current buffers for the evaluation of a version, even if newer buffers arrive before it.
        Does nothing if buffers are pinned for this epoch and version already.

        Args:
            epoch: epoch whose evaluation is due.
            version: version that is about to be evaluated.
        """
        if self._pinned.get(epoch, (None, None))[0] == version:
            return
        self._pin(epoch, version, self.newest())

    def evaluated(self, epoch: int, values: Mapping[str, Bytes]) -> None:
        """Make these buffers the job's, and pin them for an epoch's evaluation. values: bytes of the
        evaluator's buffers, by name."""
        self._buffers = _done(values)
        self._pin(epoch, self._pinned.get(epoch, (-1, None))[0], self._buffers)

    def _pin(self, epoch: int, version: int, values: Awaitable[Values]) -> None:
        """Keep the buffers of an epoch's evaluation, and drop those of the oldest epochs beyond `PINNED`."""
        self._pinned[epoch] = version, values
        while len(self._pinned) > PINNED:
            del self._pinned[min(self._pinned)]

    def of(self, epoch: int) -> Awaitable[Values]:
        """Return an awaitable of the buffers pinned for an epoch, by name; the current buffers if none are
        pinned, as for epoch 0 or an old epoch."""
        return self._pinned[epoch][1] if epoch in self._pinned else self.newest()


def mean_of(entries: Sequence[Entry], deposits: Sequence[Deposit]) -> dict[str, Bytes]:
    """Return the mean of the workers' buffers, weighted by samples, by name.

    Floating-point and complex buffers are averaged in double precision, without those that contain a NaN.
    Other buffers, such as counters, are taken from the first deposit.

    Args:
        deposits: the workers' buffers in order of rank; at least one.
    """
    found: dict[str, Bytes] = {}
    for entry in entries:
        dtype: torch.dtype = getattr(torch, entry.dtype)
        first = deposits[0].values[entry.name]
        if not (dtype.is_floating_point or dtype.is_complex) or all(
            (each.values[entry.name] == first).all() for each in deposits
        ):
            found[entry.name] = first
            continue
        wide = torch.complex128 if dtype.is_complex else torch.float64
        tensors = [tensor_of(entry, each.values[entry.name]).to(wide) for each in deposits]
        pairs = zip(deposits, tensors, strict=True)
        usable = [(each.samples, tensor) for each, tensor in pairs if not bool(tensor.isnan().any())]
        if not usable:
            found[entry.name] = first
            continue
        total = sum(samples for samples, _ in usable)
        mean = torch.zeros_like(tensors[0])
        for samples, tensor in usable:
            mean += tensor * (samples / total)
        found[entry.name] = bytes_of(mean.to(dtype))
    return found


def complete(
    parameters: Mapping[str, torch.Tensor], entries: Sequence[Entry], values: Mapping[str, Bytes]
) -> dict[str, torch.Tensor]:
    """Return the state_dict of a model, without frozen parameters that stay at the workers; no two of its
    tensors share memory.

    Args:
        parameters: trained parameters, by name.
        values: bytes of each entry that has values of its own, by name.
    """
    tensors = dict(parameters)
    absent: set[str] = set()
    for entry in entries:
        if entry.digest or entry.tied_to in absent:
            absent.add(entry.name)
            continue
        tied = entry.kind is EntryKind.TIED
        tensors[entry.name] = tensors[entry.tied_to].clone() if tied else tensor_of(entry, values[entry.name])
    return tensors


def _done(values: Mapping[str, Bytes]) -> Awaitable[Values]:
    """Return an awaitable of known values, which may be awaited any number of times."""
    return _Done(values)


def _result(values: Awaitable[Values]) -> Values:
    """Return the values of an awaitable that has completed."""
    return values.values if isinstance(values, _Done) else cast("asyncio.Future[Values]", values).result()


class _Done:
    """Values that are known, as an awaitable."""

    def __init__(self, values: Mapping[str, Bytes]) -> None:
        self.values = values

    def __await__(self) -> Generator[Any, None, Mapping[str, Bytes]]:
        yield from ()
        return self.values
