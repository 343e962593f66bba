"""Packing of a part's data for its way: entropy coding, one zstd frame for the data of all of its payloads.

The codes of a quantizer carry fewer bits than they fill, because small values are frequent. zstd's fastest
level finds that at about a gigabyte per second. Data that hardly shrinks, or is small, stays as it is.

A receiver knows from the payloads' headers how many bytes a frame must unpack to. It asks the frame for the
same number before it allocates memory, so a hostile frame takes none.

With `--entropy auto`, bytes are packed while packing saves more seconds of the link than it takes. The link's
rate is that of writes that blocked. A write into an empty buffer returns at once, however slow the link is,
so a rate is unknown until a write has blocked, or more bytes than buffers hold were written without a pause.
A sender packs while it knows no rate: that costs little, and a slow link gains much.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import zstandard

from .payload import Bytes, PayloadError
from .sizes import (
    LEAST_PACKED_BYTES,
    LEAST_SAVED,
    PACKING_BYTES_PER_S,
    PACKING_LEVEL,
    PACKING_START_S,
)

BLOCKED_S = 0.002  # a write of a chunk into a buffer takes less
BUFFERED_BYTES = 8 << 20  # more than the buffers of a connection hold
KEPT = 0.98  # share of the measurements so far that is kept at each measured write
LATEST = 0.25  # weight of the last chunk in the share that packing saves
PROBE = 32  # chunks that are not worth packing, of which one is packed to measure the share again

_MAGIC = b"\x28\xb5\x2f\xfd"  # of a frame with data; others are skipped by decoders


def pack(pieces: Sequence[Bytes]) -> Bytes | None:
    """Return the pieces, laid end to end, as one zstd frame; None if that does not save enough bytes.

    The same pieces give the same bytes.
    """
    size = sum(piece.size for piece in pieces)
    if size < LEAST_PACKED_BYTES:
        return None
    stream = zstandard.ZstdCompressor(level=PACKING_LEVEL).compressobj(size=size)
    packed = b"".join([*(stream.compress(piece.data) for piece in pieces if piece.size), stream.flush()])
    return np.frombuffer(packed, np.uint8) if len(packed) <= (1 - LEAST_SAVED) * size else None


def unpack(frame: Bytes, size: int) -> Bytes:
    """Return the `size` bytes that `pack` has packed into `frame`.

    Raises:
        PayloadError: the frame is damaged, needs a dictionary, has bytes behind it, or says or has another
            size. Its own size is checked before memory is allocated.
    """
    try:
        says = zstandard.get_frame_parameters(frame.data)
        if frame[:4].tobytes() != _MAGIC or says.dict_id:
            raise PayloadError("packed data", "a zstd frame without a dictionary", "another frame")
        if says.content_size != size:
            unknown = says.content_size == zstandard.CONTENTSIZE_UNKNOWN
            given = "one that does not say" if unknown else f"one of {says.content_size}"
            raise PayloadError("packed data", f"a frame of {size} bytes", given)
        data = zstandard.ZstdDecompressor().decompress(frame.data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise PayloadError("packed data", f"a whole zstd frame of {size} bytes", str(error)) from None
    if len(data) != size:
        raise PayloadError("packed data", f"a frame of {size} bytes", f"{len(data)} bytes")
    return np.frombuffer(data, np.uint8)


class LinkRate:
    """The measured rate of one connection, from the writes of its only sender."""

    def __init__(self) -> None:
        self._bytes = self._seconds = 0.0
        self._burst = 0

    def paused(self) -> None:
        """Note that there was nothing to write: buffers may be empty."""
        self._burst = 0

    def wrote(self, size: int, seconds: float) -> None:
        """Note that a write of `size` bytes took `seconds`."""
        self._burst += size
        if seconds > BLOCKED_S or self._burst > BUFFERED_BYTES:
            self._bytes = KEPT * self._bytes + size
            self._seconds = KEPT * self._seconds + seconds

    @property
    def byte_s(self) -> float | None:
        """Seconds that the link takes for a byte; None if unknown."""
        return self._seconds / self._bytes if self._bytes else None


class Packing:
    """The decision for each chunk of one sender whether it leaves packed (`--entropy`), which calls `pack`.

    Attributes:
        entropy: "on", "off" or "auto".
        saved_bytes: bytes by which packing has made chunks smaller so far.
    """

    def __init__(self, entropy: str = "off") -> None:
        self.entropy, self.saved_bytes = entropy, 0
        self._links: tuple[LinkRate, ...] = ()  # replaced as a whole, because other threads read it
        self._saves = 0.5  # share of its bytes that a chunk is expected to save
        self._passed = 0

    def open_link(self) -> LinkRate:
        """Return the measurement of another connection on which the same chunks leave."""
        link = LinkRate()
        self._links = (*self._links, link)
        return link

    def close_link(self, link: LinkRate) -> None:
        """Forget a connection that has ended."""
        self._links = tuple(each for each in self._links if each is not link)

    def __call__(self, pieces: Sequence[Bytes]) -> Bytes | None:
        """Return the pieces as `pack` does, or None if they leave as they are."""
        size = sum(piece.size for piece in pieces)
        small = size < LEAST_PACKED_BYTES
        if small or self.entropy == "off" or (self.entropy == "auto" and not self._pays(size)):
            return None
        packed = pack(pieces)
        saved = 0 if packed is None else size - packed.size
        self._saves += LATEST * (saved / size - self._saves)
        self.saved_bytes += saved
        return packed

    def _pays(self, size: int) -> bool:
        """Return True if packing is expected to save time on the slowest link, or if a chunk is due whose
        saving is measured."""
        known = [each.byte_s for each in self._links]
        slowest = max((each for each in known if each is not None), default=None)
        if slowest is None or self._saves * size * slowest > PACKING_START_S + size / PACKING_BYTES_PER_S:
            return True
        self._passed += 1
        return self._passed % PROBE == 0
