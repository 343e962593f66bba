"""Is a payload what it says it is?

Whoever receives a payload calls `validate` before reducing it. The scan of the codes is one read pass at
memory speed, a small part of what the reduction itself costs.
"""

from __future__ import annotations

import numpy as np

from . import kernels
from .payload import DensePayload, Payload, PayloadError, QuantizedPayload, payload_bytes


def validate(payload: Payload) -> None:
    """Raise `PayloadError` if the payload breaks a rule of its kind.

    Checked in order: element count, type and length of the data, levels (type, count, finite, positive,
    ascending), forbidden codes, padding, finite dense values.
    """
    if payload.elements < 0:
        raise PayloadError("elements", "at least 0", str(payload.elements))
    data = payload.data
    if data.dtype != np.uint8 or data.ndim != 1 or not data.flags.c_contiguous:
        raise PayloadError("data", "contiguous uint8 of one dimension", f"{data.dtype} of shape {data.shape}")
    if data.size != payload_bytes(payload):
        expected = f"{payload_bytes(payload)} bytes for {payload.elements} elements"
        raise PayloadError("data", expected, f"{data.size} bytes")
    match payload:
        case QuantizedPayload():
            _validate_levels(payload)
            _validate_codes(payload)
        case DensePayload():
            if not kernels.all_finite(payload.format, data):
                raise PayloadError("data", "finite values", "an infinity or a NaN")


def _validate_levels(payload: QuantizedPayload) -> None:
    levels, count = payload.levels, payload.scheme.level_count
    if levels.dtype != np.float32 or levels.shape != (count,):
        got = f"{levels.dtype} of shape {levels.shape}"
        raise PayloadError("levels", f"float32 of shape ({count},)", got)
    if not np.isfinite(levels).all():
        raise PayloadError("levels", "finite values", str(levels.tolist()))
    if levels[0] <= 0 or (np.diff(levels) <= 0).any():
        raise PayloadError("levels", "positive values in ascending order", str(levels.tolist()))


def _validate_codes(payload: QuantizedPayload) -> None:
    scheme, data = payload.scheme, payload.data
    if kernels.has_forbidden_code(scheme, data):
        raise PayloadError("data", "codes that name a level", f"code {scheme.forbidden_code}")
    used_bits = payload.elements * scheme.bits
    # At most one 32-bit word is partly used, so the padding is fewer than four bytes and the rest of a byte.
    padding = data[used_bits // 8 :].copy()
    if padding.size and used_bits % 8:
        padding[0] >>= used_bits % 8
    if padding.any():
        raise PayloadError("data", "zero padding after the last code", "padding bits that are set")
