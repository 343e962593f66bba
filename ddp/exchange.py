"""Frames, in which ranks send each other their payloads, and the all-gather that carries them.

A frame is one rank's message for a bundle and a step, in little-endian order:

    uint32: checksum of the terms, tensors and step, which all ranks must share
    uint32: 1 + index of the tensor whose gradient is not finite; 0 if all are finite
    uint32: bytes of the header
    header: the message `PartHeader`, which describes the payloads as it does to a server
    data: data of the payloads, end to end; empty if a gradient is not finite

The ranks' frames differ in size, but an all-gather takes buffers of equal size. Therefore each frame travels,
behind its length, in a slot. The slot's size follows from earlier frames of the bundle, and is the same on
all ranks. A second gather carries the bytes that do not fit, and the slot grows. Usually a step takes one
collective per bundle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..common.parts import Part
from ..compressors import Payload
from ..compressors.payload import Bytes
from ..proto.convert import MalformedError, decode, encode
from ..proto.manifest import Manifest
from ..proto.messages import PartHeader
from ..proto.transfer import part_header, received_payloads
from ..proto.wire import crc32c

HEAD = Struct("<III")
LENGTH = Struct("<Q")
AGREED = Struct("<I")
WASTED = 1 / 4  # largest unused share of a slot; a slot outside its bounds is resized
SPARE = 1 / 32  # a resized slot exceeds the longest frame by this share


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
    """

    payloads: Sequence[Payload]
    not_finite: int | None = None


def checksum(terms: object, manifest: Manifest, step: int) -> int:
    """Return the CRC-32C by which ranks find out whether they share terms, by their text, tensors and
    step."""
    text = f"{terms};{step}".encode()
    return crc32c((np.frombuffer(text + manifest.fingerprint, np.uint8),))


def to_bytes(frame: Frame, agreed: int) -> Bytes:
    """Serialize a frame, into new memory. agreed: `checksum` of the values that all ranks must share."""
    header = b""
    if frame.not_finite is None:
        header = encode(part_header(0, 0, 0, 0, frame.payloads))
    index_code = 0 if frame.not_finite is None else 1 + frame.not_finite
    head = HEAD.pack(agreed, index_code, len(header)) + header
    pieces = [np.frombuffer(head, np.uint8), *(payload.data for payload in frame.payloads)]
    return np.concatenate(pieces)


def from_bytes(data: Bytes, agreed: int, part: Part, manifest: Manifest, *, rank: int) -> Frame:
    """Parse and check a frame that arrived from another rank.

    Args:
        data: bytes of the frame; the payloads share this memory.
        agreed: this rank's `checksum`.
        part: range of the bundle's elements.
        manifest: the bundle's tensors.
        rank: sender.

    Raises:
        RanksDisagree: the frame has another checksum than `agreed`, or no header of payloads.
        Refused: a payload is malformed; the message names rank and tensor.
    """
    found, index_code, size = HEAD.unpack(data[: HEAD.size].tobytes())
    if found != agreed:
        raise _disagreeing(rank)
    if index_code:
        return Frame((), index_code - 1)
    start = HEAD.size + size
    try:
        header = decode(data[HEAD.size : start].tobytes(), PartHeader)
    except MalformedError as error:
        raise RanksDisagree(f"rank {rank}: expected the header of payloads, got {error}") from None
    return Frame(received_payloads(header.payloads, data[start:], part, manifest, worker=f"rank {rank}"))


def _disagreeing(rank: int) -> RanksDisagree:
    same = "the same compressor, seed, layer rule and model on every rank, at the same step"
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


class Gather:
    """Runs the all-gathers of frames. All ranks must begin and end them in the same order.

    Attributes:
        rank: this process's rank in the group, from 0.
        ranks: number of ranks in the group.
        sent: bytes that this rank has contributed to all-gathers so far, with lengths and padding.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.sent = 0
        self._slots: dict[str, int] = {}
        # Payloads lie in host memory. A backend such as NCCL cannot send that, so they are copied to the GPU;
        # a backend config that can reads like `cpu:gloo,cuda:nccl`.
        on_host = "cpu:" in dist.get_backend_config(group)
        self._device = torch.device("cpu" if on_host else "cuda")

    def agree(self, terms: object) -> None:
        """Check that all ranks have the same terms. Call it before the first `begin`.

        Ranks with different compressors might begin different all-gathers, which would block for ever. Raises
        RanksDisagree if another rank has other terms, by their text.
        """
        text = np.frombuffer(str(terms).encode(), np.uint8)
        own = np.frombuffer(AGREED.pack(crc32c((text,))), np.uint8)
        for rank, row in enumerate(self._rows(self._gather("", own, 0, own.copy()))):
            if not np.array_equal(row, own):
                raise _disagreeing(rank)

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
        if not slot:
            self._slots[flight.bundle] = most
        elif not slot * (1 - WASTED) <= most <= slot:
            self._slots[flight.bundle] = most + int(most * SPARE)
        return frames

    def _gather(self, bundle: str, frame: Bytes, slot: int, row: Bytes) -> Flight:
        """Start an all-gather of `row`, which has the same size on all ranks."""
        sent = torch.from_numpy(row).to(self._device)
        gathered = [torch.empty_like(sent) for _ in range(self.ranks)]
        torch_distributed: Any = dist  # annotates only in part
        work = torch_distributed.all_gather(gathered, sent, group=self._group, async_op=True)
        self.sent += row.size
        return Flight(bundle, frame, slot, work.wait, gathered, sent)

    def _rows(self, flight: Flight) -> list[Bytes]:
        """Wait for an all-gather and return the ranks' rows in host memory, in rank order."""
        flight.wait()
        return [row.cpu().numpy() for row in flight.gathered]


def _padded(size: int, *pieces: Bytes) -> Bytes:
    """Return the pieces end to end, padded with zeros to `size` bytes."""
    return np.concatenate([*pieces, np.zeros(size - sum(piece.size for piece in pieces), np.uint8)])
