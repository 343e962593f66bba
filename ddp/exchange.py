"""Frames, in which ranks send each other their payloads, and the collectives that carry them.

A frame is one rank's message for a bundle and a step, in little-endian order:

    uint32: checksum of the terms, tensors and step, which all ranks must share
    uint32: 1 + index of the tensor whose gradient is not finite; 0 if all are finite; `DAMAGED` if the rank
            has received a frame that it cannot read
    uint32: bytes of the header
    uint32: 1 if the data is packed by zstd (`packing`), otherwise 0
    header: the message `PartHeader`, which describes the payloads as it does to a server
    data: data of the payloads, end to end; empty if a gradient is not finite

The ranks' frames differ in size, but an all-gather takes buffers of equal size. Therefore each frame travels,
behind its length, in a slot. The slot's size follows from earlier frames of the bundle, and is the same on
all ranks. A second gather carries the bytes that do not fit, and the slot grows. Usually a step takes one
collective per bundle.

In an all-to-all (`Scatter`) each rank has a frame for each other rank, and each pair of ranks has a slot. A
row begins with the lengths of all of its sender's frames: so all ranks know whether a second one follows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..common import machine
from ..common.parts import Part
from ..compressors import Payload, PayloadError, payload_bytes
from ..compressors.packing import pack, unpack
from ..compressors.payload import Bytes, Float32, Int64
from ..proto.announced import NO_BASES, announced_payloads, invalid, names_of
from ..proto.convert import MalformedError, decode, encode
from ..proto.manifest import Manifest
from ..proto.messages import PartHeader
from ..proto.refusal import Reason, refused
from ..proto.transfer import filled_payloads, part_header
from ..proto.wire import crc32c
from .lost import lost

HEAD = Struct("<IIII")
DAMAGED = (1 << 32) - 1
LENGTH = Struct("<Q")
AGREED = Struct("<I")
WASTED = 1 / 4  # largest unused share of a slot; a slot outside its bounds is resized
SPARE = 1 / 32  # a resized slot exceeds the longest frame by this share
PROBE_BYTES = 256 << 10  # to each rank, to measure the link: more than the buffers of a shaped link hold

torch_distributed: Any = dist  # annotates only in part


class RanksDisagree(RuntimeError):
    """Raised when another rank is at another step, or has another compressor, seed, layer rule or model.

    Example:
        >>> def step(model, x):
        ...     try:
        ...         model(x).sum().backward()
        ...     except gradwire.RanksDisagree as error:
        ...         print(error)  # names the ranks whose settings, model or step differ
    """


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """One rank's message for a bundle and a step.

    Attributes:
        payloads: payloads that cover the bundle's elements end to end; none if a gradient is not finite.
        not_finite: index of a tensor whose gradient has an infinity or a NaN; None if all are finite.
        damaged: True from a rank that has received a frame that it cannot read.
    """

    payloads: Sequence[Payload]
    not_finite: int | None = None
    damaged: bool = False


def checksum(terms: object, manifest: Manifest, step: int, bases: Iterable[Float32] = ()) -> int:
    """Return the CRC-32C by which ranks find out whether they share terms, by their text, tensors, step and
    bases."""
    text = np.frombuffer(f"{terms};{step}".encode() + manifest.fingerprint, np.uint8)
    return crc32c((text, *(each.view(np.uint8) for each in bases)))


def to_bytes(frame: Frame, agreed: int, *, packs: bool = False) -> Bytes:
    """Serialize a frame, into new memory.

    Args:
        agreed: `checksum` of the values that all ranks must share.
        packs: True to pack the data where that saves bytes.
    """
    header = b""
    index_code = DAMAGED if frame.damaged else 0 if frame.not_finite is None else 1 + frame.not_finite
    if not index_code:
        header = encode(part_header(0, 0, 0, 0, frame.payloads))
    data = [payload.data for payload in frame.payloads]
    packed = pack(data) if packs else None
    head = HEAD.pack(agreed, index_code, len(header), packed is not None) + header
    return np.concatenate([np.frombuffer(head, np.uint8), *(data if packed is None else [packed])])


class Reader:
    """Parses the frames of some tensors. A header that equals the one before is not parsed again: those of
    all ranks and steps are often equal."""

    def __init__(self, part: Part, manifest: Manifest, coordinates: Mapping[int, int] = NO_BASES) -> None:
        """
        Args:
            part: range of all elements of a frame.
            manifest: the tensors.
            coordinates: number of coordinates of each tensor that has bases, by index.
        """
        self.part, self.manifest, self._coordinates = part, manifest, coordinates
        self._header: bytes | None = None
        self._announced: Sequence[Payload] = ()  # payloads of this header, without bytes
        self._names: Sequence[str] = ()

    def parse(self, data: Bytes, agreed: int, *, rank: int) -> Frame:
        """Parse and check a frame that arrived from another rank.

        Args:
            data: bytes of the frame; the payloads share this memory.
            agreed: this rank's `checksum`.
            rank: sender.

        Raises:
            RanksDisagree: the frame has another checksum than `agreed`, or no header of payloads, or its
                sender has received a damaged one.
            Refused: a payload is malformed; the message names rank and tensor.
        """
        found, index_code, size, packed = HEAD.unpack(data[: HEAD.size].tobytes())
        if found != agreed:
            raise _disagreeing(rank)
        worker = f"rank {rank}"
        if index_code == DAMAGED:
            raise RanksDisagree(
                f"{worker}: it has received a damaged frame, and its own error names the sender"
            )
        if index_code:
            return Frame((), index_code - 1)
        start = HEAD.size + size
        self._announce(data[HEAD.size : start].tobytes(), worker)
        content = data[start:]
        if packed:  # its size follows from the header, which is checked before memory is taken
            try:
                content = unpack(content, sum(map(payload_bytes, self._announced)))
            except PayloadError as error:
                raise invalid(error, worker, "payloads") from None
        return Frame(filled_payloads(self._announced, content, self._names, worker=worker))

    def _announce(self, header: bytes, worker: str) -> None:
        """Check the header of payloads and keep the payloads that it announces. Raises as `parse`."""
        if header == self._header:
            return
        try:
            headers = decode(header, PartHeader).payloads
        except MalformedError as error:
            raise RanksDisagree(f"{worker}: expected the header of payloads, got {error}") from None
        coordinates = self._coordinates
        announced = announced_payloads(
            headers, self.part, self.manifest, worker=worker, coordinates=coordinates
        )
        if self.part.elements and not announced:  # a rank without gradients sends absent payloads
            where = f"part from {self.manifest.tensor_at(self.part.start)}"
            limit = f"payloads of {self.part.elements} elements"
            raise refused(Reason.ELEMENTS, worker=worker, field=where, limit=limit, value="no payloads")
        self._names = names_of(announced, self.part, self.manifest)
        self._header, self._announced = header, announced


def _disagreeing(rank: int) -> RanksDisagree:
    same = "the same compressor, seed, layer rule, exchange and model on every rank, at the same step"
    return RanksDisagree(
        f"rank {rank}: expected {same}, got others; give every rank the same arguments of "
        "gradwire.ddp.state, and load the state of the same step on all ranks or on none"
    )


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """An all-gather that was started and not finished.

    Attributes:
        bundle: name of the bundle whose frame it carries; "" for the terms.
        slot: bytes of the frame that fit the slot.
        gathered: buffers that receive each rank's row, in rank order.
        kept: this rank's row, whose memory must stay allocated until the collective has ended.
    """

    bundle: str
    frame: Bytes
    slot: int
    wait: Callable[[], object]
    gathered: Sequence[torch.Tensor]
    kept: torch.Tensor


class Group:
    """This rank's place in a process group, and the device from which its backend sends.

    Attributes:
        rank: this process's rank in the group, from 0.
        ranks: number of ranks in the group.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        # Payloads lie in host memory. A backend such as NCCL cannot send that, so they are copied to the GPU;
        # a backend config that can reads like `cpu:gloo,cuda:nccl`.
        on_host = "cpu:" in dist.get_backend_config(group)
        self.device = torch.device("cpu" if on_host else "cuda")

    def collective(self, start: Callable[..., Any], *args: Any, **options: Any) -> Callable[[], object]:
        """Start a collective, and return the function that waits for it.

        Both raise RankLost if it fails, and torch.OutOfMemoryError if this rank's memory is full.
        """
        work = self._checked(lambda: start(*args, group=self.group, async_op=True, **options))
        return lambda: self._checked(work.wait)

    def _checked(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except torch.OutOfMemoryError:  # this rank's own
            raise
        except RuntimeError as error:
            raise lost(error, self.group) from None  # it has the error's first line


class Gather:
    """Runs the all-gathers of frames. All ranks must begin and end them in the same order.

    Attributes:
        sent: bytes that this rank has contributed to all-gathers so far, with lengths and padding.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self.sent = 0
        self._slots: dict[str, int] = {}

    def agree(self, terms: object) -> None:
        """Check that all ranks have the same terms. Call it before the first `begin`.

        Ranks with different compressors might begin different all-gathers, which would block for ever. Raises
        RanksDisagree if another rank has other terms, by their text.
        """
        text = np.frombuffer(str(terms).encode(), np.uint8)
        own = np.frombuffer(AGREED.pack(crc32c((text,))), np.uint8)
        for rank, row in enumerate(self.rows(own)):
            if not np.array_equal(row, own):
                raise _disagreeing(rank)

    def rows(self, own: Bytes) -> list[Bytes]:
        """Return the row of each rank, given this rank's, which has the same size on all ranks."""
        return self._rows(self._gather("", own, 0, own.copy()))

    def begin(self, bundle: str, frame: Bytes) -> Flight:
        """Start the all-gather of a frame's first bytes, as many as fit the bundle's slot; `end` ends it.

        bundle: name of the bundle, the same on all ranks; each bundle has a slot size of its own.
        """
        slot = self._slots.get(bundle, 0)
        length = np.frombuffer(LENGTH.pack(frame.size), np.uint8)
        return self._gather(bundle, frame, slot, _padded(LENGTH.size + slot, length, frame[:slot]))

    def end(self, flight: Flight) -> list[Bytes]:
        """Wait for an all-gather and return the whole frames of all ranks, in rank order.

        A second all-gather fetches the bytes that did not fit the slot. The slot is resized for later frames.
        """
        rows = self._rows(flight)
        lengths = [int(LENGTH.unpack(row[: LENGTH.size].tobytes())[0]) for row in rows]
        slot, most = flight.slot, max(lengths)
        frames = [row[LENGTH.size : LENGTH.size + length] for row, length in zip(rows, lengths, strict=True)]
        if most > slot:
            rest = _padded(most - slot, flight.frame[slot:])
            tails = self._rows(self._gather(flight.bundle, flight.frame, slot, rest))
            frames = [
                np.concatenate([head, tail])[:length]
                for head, tail, length in zip(frames, tails, lengths, strict=True)
            ]
        self._slots[flight.bundle] = _resized(slot, most)
        return frames

    def _gather(self, bundle: str, frame: Bytes, slot: int, row: Bytes) -> Flight:
        """Start an all-gather of `row`, which has the same size on all ranks."""
        sent = torch.from_numpy(row).to(self._group.device)
        gathered = [torch.empty_like(sent) for _ in range(self._group.ranks)]
        wait = self._group.collective(torch_distributed.all_gather, gathered, sent)
        self.sent += row.size
        return Flight(bundle, frame, slot, wait, gathered, sent)

    def _rows(self, flight: Flight) -> list[Bytes]:
        """Wait for an all-gather and return the ranks' rows in host memory, in rank order."""
        flight.wait()
        return [row.cpu().numpy() for row in flight.gathered]


@dataclass(frozen=True, slots=True, eq=False)
class Scattered:
    """An all-to-all that was started and not finished.

    Attributes:
        bundle: name of the bundle whose frames it carries.
        frames: this rank's frame for each rank.
        slots: bytes of the slot for each pair of sender and receiver: int64, shape (ranks, ranks).
        received: buffer that receives the rows of all ranks, end to end.
        kept: this rank's rows, whose memory must stay allocated until the collective has ended.
    """

    bundle: str
    frames: Sequence[Bytes]
    slots: Int64
    wait: Callable[[], object]
    received: torch.Tensor
    kept: torch.Tensor


class Scatter:
    """Runs the all-to-alls of frames. All ranks must begin and end them in the same order.

    Attributes:
        sent: bytes that this rank has sent to other ranks so far, with lengths and padding.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self.sent = 0
        self._slots: dict[str, Int64] = {}

    def begin(self, bundle: str, frames: Sequence[Bytes]) -> Scattered:
        """Start the all-to-all of this rank's frame for each rank; `end` ends it.

        bundle: name of the bundle, the same on all ranks; each bundle has slots of its own.
        """
        rank, ranks = self._group.rank, self._group.ranks
        slots = self._slots.get(bundle, np.zeros((ranks, ranks), np.int64))
        lengths = np.array([frame.size for frame in frames], "<i8").view(np.uint8)
        rows = [
            _padded(lengths.size + int(slot), lengths, frame[:slot])
            for slot, frame in zip(slots[rank], frames, strict=True)
        ]
        return self._exchange(bundle, frames, slots, rows, lengths.size + slots[:, rank])

    def end(self, flight: Scattered) -> list[Bytes]:
        """Wait for an all-to-all and return the whole frame of each rank for this one, in rank order.

        A second all-to-all carries the bytes that did not fit the slots, if any did not, on any rank. The
        slots are resized for later frames.
        """
        rank, ranks = self._group.rank, self._group.ranks
        slots, head = flight.slots, 8 * ranks
        rows = self._rows(flight, head + slots[:, rank])
        lengths = np.stack([np.frombuffer(row[:head].tobytes(), "<i8") for row in rows])
        # Own frames do not travel.
        np.fill_diagonal(lengths, 0)
        frames = [row[head : head + int(size)] for row, size in zip(rows, lengths[:, rank], strict=True)]
        rest = np.maximum(lengths - slots, 0)
        if rest.any():
            sizes = zip(flight.frames, slots[rank], rest[rank], strict=True)
            tails = [frame[slot : slot + size] for frame, slot, size in sizes]
            missing = self._exchange(flight.bundle, (), slots, tails, rest[:, rank])
            frames = [
                np.concatenate([one, other]) if other.size else one
                for one, other in zip(frames, self._rows(missing, rest[:, rank]), strict=True)
            ]
        frames[rank] = flight.frames[rank]
        pairs = zip(slots.reshape(-1).tolist(), lengths.reshape(-1).tolist(), strict=True)
        self._slots[flight.bundle] = np.array([_resized(*pair) for pair in pairs]).reshape(ranks, ranks)
        return frames

    def _exchange(
        self, bundle: str, frames: Sequence[Bytes], slots: Int64, rows: Sequence[Bytes], sizes: Int64
    ) -> Scattered:
        """Start an all-to-all of a row for each rank. sizes: bytes of each rank's row for this one."""
        sent = torch.from_numpy(np.concatenate(rows)).to(self._group.device)
        received = torch.empty(int(sizes.sum()), dtype=torch.uint8, device=self._group.device)
        splits = sizes.tolist(), [row.size for row in rows]
        wait = self._group.collective(torch_distributed.all_to_all_single, received, sent, *splits)
        self.sent += sent.numel() - rows[self._group.rank].size
        return Scattered(bundle, frames, slots, wait, received, sent)

    def _rows(self, flight: Scattered, sizes: Int64) -> list[Bytes]:
        """Wait for an all-to-all and return the ranks' rows in host memory, in rank order."""
        flight.wait()
        return np.split(flight.received.cpu().numpy(), np.cumsum(sizes)[:-1])


class Collectives:
    """The collectives of a process group. They need a call of every rank, in the same order."""

    def __init__(self, process_group: dist.ProcessGroup | None, terms: object) -> None:
        """Check that all ranks have the same terms. Raises RanksDisagree if they have not."""
        self.group = Group(process_group)
        self.gather, self.scatter = Gather(self.group), Scatter(self.group)
        self.gather.agree(terms)

    def ranks_here(self) -> int:
        """Return the number of ranks that may use the same cores of this machine as this one."""
        name = np.frombuffer(f"{machine.name()};{machine.core_numbers()}".encode(), np.uint8)
        own = np.frombuffer(AGREED.pack(crc32c((name,))), np.uint8)
        return sum(np.array_equal(row, own) for row in self.gather.rows(own))

    def link_rate(self) -> float:
        """Measure the bytes per second that a rank sends while all of them do; return the least of all ranks,
        the same on each. Its bytes are not in `sent`."""
        if self.group.ranks == 1:
            return math.inf
        before, seconds = self.scatter.sent, 0.0
        for size in (1, PROBE_BYTES):  # the first opens connections
            began = time.perf_counter()
            self.scatter.end(self.scatter.begin("", [np.zeros(size, np.uint8)] * self.group.ranks))
            seconds = time.perf_counter() - began
        self.scatter.sent = before
        own = np.array([PROBE_BYTES * (self.group.ranks - 1) / seconds], "<f8")
        return min(float(row.view("<f8")[0]) for row in self.gather.rows(own.view(np.uint8)))

    @property
    def sent(self) -> int:
        """Bytes that this rank has sent to each other rank so far, on average."""
        return self.gather.sent + self.scatter.sent // max(1, self.group.ranks - 1)


def _resized(slot: int, most: int) -> int:
    """Return the slot for later frames, given the longest frame in a slot of this size."""
    if not slot:
        return most
    return slot if slot * (1 - WASTED) <= most <= slot else most + int(most * SPARE)


def _padded(size: int, *pieces: Bytes) -> Bytes:
    """Return the pieces end to end, padded with zeros to `size` bytes."""
    return np.concatenate([*pieces, np.zeros(size - sum(piece.size for piece in pieces), np.uint8)])
