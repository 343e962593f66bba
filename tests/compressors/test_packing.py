"""A part's data is packed where that pays, and no frame makes a receiver take more memory than it expects."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import zstandard

from gradwire.compressors.packing import pack, unpack
from gradwire.compressors.payload import Bytes, PayloadError, pack_codes
from gradwire.compressors.sizes import LEAST_PACKED_BYTES, LEAST_SAVED

CODES = np.random.default_rng(1).binomial(15, 0.5, 50_000)  # 2.3 bits of entropy
DATA = pack_codes(4, CODES)


def frame(data: bytes, *, says_size: bool = True) -> Bytes:
    return np.frombuffer(zstandard.ZstdCompressor(write_content_size=says_size).compress(data), np.uint8)


def test_codes_take_little_more_than_their_entropy() -> None:
    packed = pack([DATA])
    assert packed is not None
    share = np.bincount(CODES) / CODES.size
    entropy = -(share[share > 0] * np.log2(share[share > 0])).sum()
    assert packed.size < 1.06 * entropy / 8 * CODES.size
    assert unpack(packed, DATA.size).tobytes() == DATA.tobytes()


def test_pieces_are_packed_end_to_end_and_always_alike() -> None:
    pieces = [DATA[:100], DATA[:0], DATA[101:9001:3], DATA]
    pieces = [np.ascontiguousarray(piece) for piece in pieces]
    packed, again = pack(pieces), pack(pieces)
    assert packed is not None
    assert again is not None
    assert packed.tobytes() == again.tobytes()
    whole = np.concatenate(pieces)
    assert unpack(packed, whole.size).tobytes() == whole.tobytes()


def test_little_data_and_data_that_hardly_shrinks_stay() -> None:
    zeros = np.zeros(LEAST_PACKED_BYTES, np.uint8)
    assert pack([]) is None
    assert pack([zeros[1:]]) is None
    assert pack([zeros]) is not None
    noise = np.random.default_rng(2).integers(0, 256, 100_000, np.uint8)
    kept, short = round(LEAST_SAVED * noise.size), 500
    assert pack([noise, np.zeros(kept - short, np.uint8)]) is None
    assert pack([noise, np.zeros(kept + 3 * short, np.uint8)]) is not None


BOMB = bytes(64 << 20)


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (frame(BOMB), "a frame of 25000 bytes, got one of 67108864"),
        (frame(BOMB, says_size=False), "got one that does not say"),
        (np.concatenate([frame(DATA.tobytes()), frame(BOMB)]), "a whole zstd frame of 25000 bytes"),
        (np.append(frame(DATA.tobytes()), np.uint8(0)), "a whole zstd frame of 25000 bytes"),
        (frame(DATA.tobytes())[:-1], "a whole zstd frame of 25000 bytes"),
        (frame(DATA.tobytes())[:3], "a whole zstd frame of 25000 bytes"),
        (frame(b""), "got one of 0"),
        (DATA, "a whole zstd frame of 25000 bytes"),
        (np.frombuffer(b"\x50\x2a\x4d\x18\xa8\x61\x00\x00" + bytes(25000), np.uint8), "without a dictionary"),
    ],
    ids=["bomb", "unknown", "second", "behind", "cut", "head", "empty", "raw", "skippable"],
)
def test_hostile_frames_are_refused_before_memory_is_taken(sent: Bytes, message: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(PayloadError, match=message):
            unpack(sent, DATA.size)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_frame_of_another_size_than_it_says_is_refused() -> None:
    sent = frame(DATA.tobytes()).copy()
    at = sent.tobytes().index((DATA.size - 256).to_bytes(2, "little"))
    sent[at : at + 2] = np.frombuffer((DATA.size - 257).to_bytes(2, "little"), np.uint8)
    with pytest.raises(PayloadError, match="a whole zstd frame of 24999 bytes"):
        unpack(sent, DATA.size - 1)


def test_frame_with_a_dictionary_is_refused() -> None:
    samples: list[bytes | bytearray | memoryview] = [
        DATA[i : i + 400].tobytes() for i in range(0, 20_000, 50)
    ]
    dictionary = zstandard.train_dictionary(2000, samples)
    sent = zstandard.ZstdCompressor(dict_data=dictionary).compress(DATA.tobytes())
    with pytest.raises(PayloadError, match="without a dictionary"):
        unpack(np.frombuffer(sent, np.uint8), DATA.size)
