"""Frames that ranks send each other, and the all-gather that carries them.

A frame is one rank's message for a bundle and a step, in little-endian order:

    uint32  checksum of the terms, tensors and step, which all ranks must share
    uint32  1 + index of the tensor whose gradient is not finite; 0 if all are
    uint32  bytes of the header
    header  the message `Part`, which describes the payloads as it does to a server
    data    data of the payloads, end to end; empty if a gradient is not finite

The ranks' frames differ in size, but an all-gather takes equal ones. So each frame travels behind its length
in a slot, whose size follows from earlier frames of the bundle and is the same on all ranks. A second gather
carries the bytes that did not fit, and the slot grows. Usually a step takes one collective per bundle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..compressors import Part, Payload
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
SPARE = 1 / 32  # a resized slot exceeds the frame by this share


class RanksDisagree(RuntimeError):
    """Another rank is at another step, or has another compressor, seed or model."""


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """payloads: end to end. not_finite: index of a tensor with a gradient that is not finite, or None."""

    payloads: Sequence[Payload]
    not_finite: int | None = None


def checksum(terms: object, manifest: Manifest, step: int) -> int:
    """Return the checksum of the values that all ranks must share."""
    text = f"{terms};{step}".encode()
    return crc32c((np.frombuffer(text + manifest.fingerprint, np.uint8),))


def to_bytes(frame: Frame, agreed: int) -> Bytes:
    """Return the frame as uint8, in memory of its own. agreed: the checksum."""
    header = b""
    if frame.not_finite is None:
        header = encode(part_header(0, 0, 0, 0, frame.payloads))
    place = 0 if frame.not_finite is None else 1 + frame.not_finite
    head = HEAD.pack(agreed, place, len(header)) + header
    pieces = [np.frombuffer(head, np.uint8), *(payload.data for payload in frame.payloads)]
    return np.concatenate(pieces)


def from_bytes(data: Bytes, agreed: int, part: Part, manifest: Manifest, *, rank: int) -> Frame:
    """Return the checked frame of `rank`; its payloads share the memory of `data`.

    Raises:
        RanksDisagree: the rank has other terms.
        Refused: a payload is malformed; the message names rank and tensor.
    """
    found, place, size = HEAD.unpack(data[: HEAD.size].tobytes())
    if found != agreed:
        raise _disagreeing(rank)
    if place:
        return Frame((), place - 1)
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
    """A gather under way. kept: memory that must not be freed until it has ended."""

    bundle: str
    frame: Bytes
    slot: int
    wait: Callable[[], object]
    gathered: Sequence[torch.Tensor]
    kept: torch.Tensor


class Gather:
    """All-gathers of frames, which all ranks begin and end in the same order.

    Attributes:
        sent: bytes that this rank has given to them, with lengths and padding.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.sent = 0
        self._slots: dict[str, int] = {}
        # Payloads lie in host memory, which not every backend can send.
        on_host = "cpu:" in dist.get_backend_config(group)  # such as `cpu:gloo,cuda:nccl`
        self._device = torch.device("cpu" if on_host else "cuda")

    def agree(self, terms: object) -> None:
        """Compare the ranks' terms, before any gather: with other compressors ranks may begin other gathers.

        Raises:
            RanksDisagree: a rank has other terms.
        """
        text = np.frombuffer(str(terms).encode(), np.uint8)
        own = np.frombuffer(AGREED.pack(crc32c((text,))), np.uint8)
        for rank, row in enumerate(self._rows(self._gather("", own, 0, own.copy()))):
            if not np.array_equal(row, own):
                raise _disagreeing(rank)

    def begin(self, bundle: str, frame: Bytes) -> Flight:
        """Send as much of a frame as fits its slot. bundle: its name, the same on all ranks."""
        slot = self._slots.get(bundle, 0)
        length = np.frombuffer(LENGTH.pack(frame.size), np.uint8)
        return self._gather(bundle, frame, slot, _padded(LENGTH.size + slot, length, frame[:slot]))

    def end(self, flight: Flight) -> list[Bytes]:
        """Wait for the ranks' frames and return them in rank order."""
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
        sent = torch.from_numpy(row).to(self._device)
        gathered = [torch.empty_like(sent) for _ in range(self.ranks)]
        torch_distributed: Any = dist  # annotates only in part
        work = torch_distributed.all_gather(gathered, sent, group=self._group, async_op=True)
        self.sent += row.size
        return Flight(bundle, frame, slot, work.wait, gathered, sent)

    def _rows(self, flight: Flight) -> list[Bytes]:
        flight.wait()
        return [row.cpu().numpy() for row in flight.gathered]


def _padded(size: int, *pieces: Bytes) -> Bytes:
    """Return the pieces end to end, with zeros behind them up to `size` bytes."""
    return np.concatenate([*pieces, np.zeros(size - sum(piece.size for piece in pieces), np.uint8)])
