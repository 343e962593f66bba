"""The validation of payloads that a process receives.

A receiver calls `check_announcement` before it allocates memory for the data, and `validate` before it sums
the payload. The scan of the data is one read pass at memory speed, a small fraction of the cost of the sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from . import kernels
from .indices import decode_indices
from .payload import (
    EXPONENTS,
    AbsentPayload,
    Bytes,
    CodeFormat,
    DenseFormat,
    DensePayload,
    Float32,
    IndexCoding,
    LinearPayload,
    Payload,
    PayloadError,
    ProjectedPayload,
    QuantizedPayload,
    SparsePayload,
    check_linear,
    code_words,
    payload_bytes,
)

# Indices are 32-bit numbers. With one bit less, no gap overflows 64 bits while it is decoded.
MAX_SPARSE_ELEMENTS = 2**31 - 1


def check_announcement(payload: Payload) -> None:
    """Raise `PayloadError` if a field other than the data breaks a rule of the payload's kind.

    If it passes, `payload_bytes` is bounded: by 4 bytes per element, bucket and block, and for a sparse
    payload by the largest size of the indices of its elements.
    """
    if payload.elements < 0:
        raise PayloadError("elements", "at least 0", str(payload.elements))
    match payload:
        case DensePayload():
            pass
        case QuantizedPayload():
            _check_levels(payload)
        case LinearPayload():
            check_linear(payload.bits, payload.bucket)
        case SparsePayload():
            _check_sparse(payload)
        case ProjectedPayload():
            _check_projected(payload)
        case AbsentPayload():
            pass


def validate(payload: Payload) -> None:
    """Raise `PayloadError` if the payload breaks a rule of its kind.

    It checks in this order: the fields that are announced before the data; type and length of the data; and
    the contents of the data, which are indices, forbidden codes, padding and finite values.
    """
    check_announcement(payload)
    check_data(payload)


def check_data(payload: Payload) -> None:
    """Raise `PayloadError` if the data of a payload that passes `check_announcement` breaks a rule."""
    data = payload.data
    if data.dtype != np.uint8 or data.ndim != 1 or not data.flags.c_contiguous:
        raise PayloadError("data", "contiguous uint8 of one dimension", f"{data.dtype} of shape {data.shape}")
    if data.size != payload_bytes(payload):
        expected = f"{payload_bytes(payload)} bytes for {payload.elements} elements"
        raise PayloadError("data", expected, f"{data.size} bytes")
    match payload:
        case QuantizedPayload():
            _validate_codes(payload)
        case DensePayload():
            if not kernels.cpu.all_finite(payload.format, data):
                raise PayloadError("data", "finite values", "an infinity or a NaN")
        case LinearPayload():
            _validate_linear(payload)
        case SparsePayload():
            try:
                decode_indices(payload)
            except ValueError as error:
                expected = f"{payload.count} ascending indices below {payload.elements}"
                raise PayloadError("indices", expected, str(error)) from None
            check_data(payload.value_payload())
        case ProjectedPayload():
            check_data(payload.value_payload())
        case AbsentPayload():
            pass


def check_projected_data(payloads: Sequence[ProjectedPayload]) -> None:
    """Raise `PayloadError` as `check_data` does for each payload; linear codes of one form are checked in one
    call, if all are valid. payloads: their data are contiguous uint8 of `payload_bytes`."""
    alike: dict[tuple[int, int], list[ProjectedPayload]] = {}
    for payload in payloads:
        values = payload.values
        if isinstance(values, LinearPayload):
            alike.setdefault((values.bits, values.bucket), []).append(payload)
        else:
            check_data(payload)
    for (bits, bucket), group in alike.items():
        counts, data = [each.count for each in group], np.concatenate([each.data for each in group])
        if not kernels.linear.are_valid(bits, bucket, counts, data):
            for payload in group:
                check_data(payload)


def _check_sizes(payload: QuantizedPayload) -> int:
    """Return the number of blocks. Raises `PayloadError` if their sizes do not add up to the elements."""
    sizes = payload.sizes
    if sizes is None:
        return 1
    if sizes.dtype != np.int64 or sizes.ndim != 1:
        raise PayloadError("sizes", "int64 of one dimension", f"{sizes.dtype} of shape {sizes.shape}")
    if (sizes < 0).any():
        raise PayloadError("sizes", "at least 0 each", str(int(sizes.min())))
    total = sum(sizes.tolist())  # Python's integers do not overflow
    if total != payload.elements:
        raise PayloadError("sizes", f"{payload.elements} elements in all", str(total))
    return sizes.size


def _check_levels(payload: QuantizedPayload) -> None:
    levels, count = payload.levels, payload.format.level_count
    total = count * _check_sizes(payload)
    if levels.dtype != np.float32 or levels.shape != (total,):
        got = f"{levels.dtype} of shape {levels.shape}"
        raise PayloadError("levels", f"float32 of shape ({total},)", got)
    each = levels.reshape(-1, count)
    _raise_if_wrong(each, ~np.isfinite(each).all(axis=1), "finite values")
    if payload.format is CodeFormat.CODEBOOK_8BIT:
        return
    if payload.format is CodeFormat.BINARY:
        _raise_if_wrong(each, each[:, 0] > each[:, 1], "values in ascending order")
    else:
        wrong = (each[:, 0] <= 0) | (each[:, 1:] <= each[:, :-1]).any(axis=1)
        _raise_if_wrong(each, wrong, "positive values in ascending order")


def _raise_if_wrong(levels: Float32, wrong: npt.NDArray[np.bool_] | np.bool_, expected: str) -> None:
    """Raise `PayloadError` with the levels of the first wrong block; return if no block is wrong.

    levels: a row for each block. wrong: True for each block that breaks a rule.
    """
    if wrong.any():
        raise PayloadError("levels", expected, str(levels[int(wrong.argmax())].tolist()))


def _check_projected(payload: ProjectedPayload) -> None:
    if not 1 <= payload.count <= payload.elements:
        raise PayloadError("count", f"1 to {payload.elements}", str(payload.count))
    values, (least, most) = payload.values, EXPONENTS
    if isinstance(values, QuantizedPayload) and values.format is CodeFormat.VOTE:
        raise PayloadError("values", "values that can be added", "votes")
    scaled = isinstance(values, DensePayload) and values.format is DenseFormat.FLOAT16
    if payload.exponent and not scaled:
        raise PayloadError("exponent", "0, except for float16", str(payload.exponent))
    if not least <= payload.exponent <= most:
        raise PayloadError("exponent", f"{least} to {most}", str(payload.exponent))
    check_announcement(values)


def _check_sparse(payload: SparsePayload) -> None:
    if payload.elements > MAX_SPARSE_ELEMENTS:
        raise PayloadError("elements", f"at most {MAX_SPARSE_ELEMENTS}, if sparse", str(payload.elements))
    if not 0 <= payload.count <= payload.elements:
        raise PayloadError("count", f"0 to {payload.elements}", str(payload.count))
    if payload.values.elements != payload.count:
        raise PayloadError("values", f"{payload.count} elements", f"{payload.values.elements} elements")
    if isinstance(payload.values, QuantizedPayload) and payload.values.format is CodeFormat.VOTE:
        raise PayloadError("values", "values that can be added", "votes")
    check_announcement(payload.values)
    match payload.coding:
        case IndexCoding.GAPS:
            if not 0 <= payload.low_bits <= 31:
                raise PayloadError("low_bits", "0 to 31", str(payload.low_bits))
            limit = kernels.sparse.gaps_limit(payload.elements, payload.count, payload.low_bits)
            fits, expected = 0 <= payload.index_bytes <= limit, f"at most {limit}"
        case IndexCoding.BITMAP:
            size = -(-payload.elements // 8)
            fits, expected = payload.index_bytes == size, str(size)
        case IndexCoding.SEEDED | IndexCoding.UNIFORM:
            fits, expected = payload.index_bytes == 0, "0"
    if not fits:
        raise PayloadError("index_bytes", expected, str(payload.index_bytes))


def _validate_codes(payload: QuantizedPayload) -> None:
    format, data = payload.format, payload.data
    if format.forbidden_code is not None and kernels.cpu.has_forbidden_code(format, data):
        raise PayloadError("data", "codes that name a level", f"code {format.forbidden_code}")
    if payload.sizes is None:
        _check_padding(data, payload.elements * format.bits)
        return
    # Of each block that does not fill its last word, check that word.
    used = payload.sizes % 32 * format.bits % 32
    ends = np.cumsum(code_words(format.bits, payload.sizes))
    last = data.view(np.uint32)[ends[used > 0] - 1]
    if (last >> used[used > 0].astype(np.uint32)).any():
        raise _padding_set()


def _validate_linear(payload: LinearPayload) -> None:
    scales, codes = payload.scales(), payload.codes()
    most = np.float32(kernels.FLOAT32_MAX / np.float32(2 ** (payload.bits - 1)))
    # Both comparisons are false for a NaN.
    if not ((scales >= 0) & (scales <= most)).all():
        raise PayloadError("scales", f"finite values from 0 to {most}", "a value outside that range")
    if kernels.linear.has_forbidden_linear(payload.bits, payload.elements, codes):
        raise PayloadError("data", "codes that have an opposite", f"code {-(2 ** (payload.bits - 1))}")
    _check_padding(codes, payload.elements * payload.bits)


def _check_padding(data: Bytes, used_bits: int) -> None:
    # At most one 32-bit word is partly used: the padding is less than four bytes.
    padding = data[used_bits // 8 :].copy()
    if padding.size and used_bits % 8:
        padding[0] >>= used_bits % 8
    if padding.any():
        raise _padding_set()


def _padding_set() -> PayloadError:
    return PayloadError("data", "zero padding after the last code", "padding bits that are set")
