"""Bundles on their way: gathered by all ranks in one stage, or by way of owners in two.

Gathered, every rank sends its payloads to all ranks, and each adds all of them in rank order. With owners,
every rank sends each owner its share of the payloads. The owner adds the shares in rank order, compresses the
mean with a residual of its own, and sends it to all ranks.

The second stage of a bundle begins after the first stage of a later one has begun. This order is the same on
all ranks, and on a link that limits the step, the later bundle's bytes follow while an owner waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from ..compressors import NonFiniteGradient, Payload, Spike
from ..compressors.payload import Bytes, Float32
from ..proto.refusal import Refused
from .bundle import Bundle, mean
from .exchange import Collectives, Flight, Frame, RanksDisagree, to_bytes
from .shares import Shares

Compress = Callable[[Bundle, torch.Tensor], Sequence[Payload]]


def framed(bundle: Bundle, compress: Callable[[], Sequence[Payload]]) -> Frame:
    """Return the frame of the payloads from `compress`, or one that names the bundle's tensor that is not
    finite."""
    try:
        return Frame(compress())
    except NonFiniteGradient as error:
        return Frame((), [each.name for each in bundle.parameters].index(error.name))


class Travelling(Protocol):
    """A bundle on its way. Methods are called in the order in which they stand here, each once."""

    def proceed(self) -> None:
        """Begin the second stage, if there is one."""
        ...

    def receive(self) -> list[str]:
        """Receive everything; return tensor and rank of each value that is not finite, for messages.

        Raises:
            RanksDisagree: a frame has another checksum.
            Refused: a frame is damaged.
        """
        ...

    def write(self, out: Float32) -> None:
        """Write the mean gradients to `out`, if all values are finite."""
        ...

    def finish(self) -> list[Spike]:
        """Make the step's residuals permanent; return this rank's spikes."""
        ...

    def abandon(self) -> None:
        """Discard the step's residuals, before or after `receive`."""
        ...


@dataclass(slots=True, eq=False)
class Passage:
    """The way of one bundle in one step.

    Attributes:
        name: name of the bundle, the same on all ranks.
        agreed: CRC-32C that the frames of all ranks must carry.
        packs: True to pack the data of frames.
    """

    collectives: Collectives
    name: str
    agreed: int
    packs: bool

    def to_bytes(self, frame: Frame) -> Bytes:
        return to_bytes(frame, self.agreed, packs=self.packs)


class Gathered:
    """A bundle whose frames all ranks gather."""

    def __init__(self, passage: Passage, bundle: Bundle, frame: Frame) -> None:
        self._passage, self._bundle = passage, bundle
        self._flight = passage.collectives.gather.begin(passage.name, passage.to_bytes(frame))
        self._frames: Sequence[Frame] = ()

    def proceed(self) -> None:
        """Do nothing: there is one stage."""

    def receive(self) -> list[str]:
        self._frames = [
            self._bundle.reader.parse(data, self._passage.agreed, rank=rank)
            for rank, data in enumerate(self._passage.collectives.gather.end(self._flight))
        ]
        return not_finite(self._bundle, self._frames)

    def write(self, out: Float32) -> None:
        self._bundle.mean([frame.payloads for frame in self._frames], out)

    def finish(self) -> list[Spike]:
        return self._bundle.finish()

    def abandon(self) -> None:
        self._flight.wait()
        self._bundle.abandon()


class Owned:
    """A bundle whose means are made by owners."""

    def __init__(
        self,
        passage: Passage,
        bundle: Bundle,
        frame: Frame,
        shares: Shares,
        owned: Bundle,
        compress: Compress,
    ) -> None:
        """
        Args:
            shares: the pieces of the bundle, by owner.
            owned: this rank's share of the mean, with its residual.
            compress: function that compresses this share.
        """
        self._passage, self._bundle, self._shares = passage, bundle, shares
        self._owned, self._compress = owned, compress
        cut = (
            shares.cut(frame.payloads) if frame.not_finite is None else [()] * passage.collectives.group.ranks
        )
        frames = [passage.to_bytes(Frame(payloads, frame.not_finite)) for payloads in cut]
        self._scattered = passage.collectives.scatter.begin(passage.name, frames)
        self._flight: Flight | None = None
        self._refused: Refused | RanksDisagree | None = None
        self._bad: list[str] = []
        self._frames: Sequence[Frame] = ()

    def proceed(self) -> None:
        arrived = self._passage.collectives.scatter.end(self._scattered)
        try:
            frames = [
                self._parse(data, self._passage.collectives.group.rank, sender)
                for sender, data in enumerate(arrived)
            ]
        except (Refused, RanksDisagree) as error:  # told to all ranks, of which each waits for this one
            self._refused, frame = error, Frame((), damaged=True)
        else:
            self._bad = not_finite(self._bundle, frames)
            frame = Frame((), 0) if self._bad else framed(self._owned, lambda: self._mean(frames))
        self._flight = self._passage.collectives.gather.begin(
            self._passage.name, self._passage.to_bytes(frame)
        )

    def receive(self) -> list[str]:
        assert self._flight is not None
        arrived = self._passage.collectives.gather.end(self._flight)
        if self._refused is not None:
            raise self._refused
        self._frames = [self._parse(data, rank, rank) for rank, data in enumerate(arrived)]
        if self._bad:
            return self._bad
        return [
            f"the mean of {self._shares.owned[rank][frame.not_finite].name!r}, at its owner, rank {rank}"
            for rank, frame in enumerate(self._frames)
            if frame.not_finite is not None
        ]

    def write(self, out: Float32) -> None:
        self._shares.decode([frame.payloads for frame in self._frames], out)

    def finish(self) -> list[Spike]:
        self._owned.finish()
        return self._bundle.finish()

    def abandon(self) -> None:
        self._scattered.wait()
        if self._flight is not None:
            self._flight.wait()
        self._bundle.abandon()
        self._owned.abandon()

    def _parse(self, data: Bytes, owner: int, sender: int) -> Frame:
        """Parse a frame of an owner's share."""
        return self._shares.readers[owner].parse(data, self._passage.agreed, rank=sender)

    def _mean(self, frames: Sequence[Frame]) -> Sequence[Payload]:
        """Return the compressed mean of this rank's share."""
        out = np.empty(self._owned.elements, np.float32)
        mean([frame.payloads for frame in frames], out)
        return self._compress(self._owned, torch.from_numpy(out))


def not_finite(bundle: Bundle, frames: Sequence[Frame]) -> list[str]:
    """Return tensor and rank of each gradient that is not finite, for messages."""
    return [
        f"{bundle.parameters[frame.not_finite].name!r} on rank {rank}"
        for rank, frame in enumerate(frames)
        if frame.not_finite is not None
    ]
