"""Packing of a part's data for its way: entropy coding, one zstd frame for the data of all of its payloads.

The codes of a quantizer carry fewer bits than they fill, because small values are frequent. zstd's fastest
level finds that at about a gigabyte per second. Data that hardly shrinks, or is small, stays as it is.

A receiver knows from the payloads' headers how many bytes a frame must unpack to. It asks the frame for the
same number before it allocates memory, so a hostile frame takes none.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import zstandard

from .payload import Bytes, PayloadError
from .sizes import LEAST_PACKED_BYTES, LEAST_SAVED, PACKING_LEVEL

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
