"""A part's data is packed where that pays, and no frame makes a receiver take more memory than it expects."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import zstandard

from gradwire.compressors.packing import BUFFERED_BYTES, PROBE, LinkRate, Packing, pack, unpack
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


MBIT = 125_000  # bytes per second


def auto(*rates: float) -> Packing:
    """The packing of a sender on links of these rates, in bytes per second."""
    packing = Packing("auto")
    for rate in rates:
        packing.open_link().wrote(2 * BUFFERED_BYTES, 2 * BUFFERED_BYTES / rate)
    return packing


def test_auto_packs_where_the_link_is_slower_than_packing() -> None:
    packed = pack([DATA])
    assert packed is not None
    for slow in (auto(), auto(100 * MBIT), auto(1000 * MBIT), auto(1e10, 100 * MBIT)):
        found = slow([DATA])
        assert found is not None
        assert found.tobytes() == packed.tobytes()
        assert slow.saved_bytes == DATA.size - packed.size
    assert auto(1e10)([DATA]) is None
    assert Packing("off")([DATA]) is None
    on = Packing("on")
    on.open_link().wrote(2 * BUFFERED_BYTES, 1e-6)
    assert on([DATA]) is not None


def test_auto_forgets_the_link_of_a_worker_that_left() -> None:
    packing = auto(1e10)
    link = packing.open_link()
    link.wrote(1000, 1.0)
    assert packing([DATA]) is not None
    packing.close_link(link)
    assert packing([DATA]) is None


def test_auto_tries_data_that_does_not_shrink_now_and_then() -> None:
    noise, packing = np.random.default_rng(3).integers(0, 256, 100_000, np.uint8), auto(100 * MBIT)
    for _ in range(20):
        assert packing([noise]) is None
    tried = [packing([DATA]) is not None for _ in range(2 * PROBE)]
    assert not tried[0]
    first = tried.index(True)
    assert first < PROBE
    assert all(tried[first:])


def test_a_write_into_a_buffer_is_no_measurement_of_the_link() -> None:
    link = LinkRate()
    for _ in range(100):
        link.wrote(1 << 20, 1e-4)
        link.paused()
    assert link.byte_s is None
    for _ in range(1 + BUFFERED_BYTES // (1 << 20)):
        link.wrote(1 << 20, 1e-4)
    assert link.byte_s == pytest.approx(1e-4 / (1 << 20))
    link = LinkRate()
    link.wrote(1 << 20, 1e-4)
    link.wrote(1 << 20, 0.1)
    assert link.byte_s == pytest.approx(0.1 / (1 << 20))
