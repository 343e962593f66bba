"""Payloads back to numbers: one of them, or the weighted sum of many.

The sum is what a server computes each round. It is accumulated in float32, strictly in the order given:

    out = 0;  for w in order:  out += float32(weights[w]) * decode(payloads[w])

where product and sum are each rounded to float32, so the bits of the result depend on the order of the list
and on nothing else: not on when a payload arrived, on threads, or on the processor. The weight is multiplied
into the few levels of a quantized payload rather than into its elements, which is the same product.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from . import kernels
from .payload import CodeScheme, DenseFormat, DensePayload, Float32, Payload, QuantizedPayload


def decode(payload: Payload) -> Float32:
    """The values of a valid payload: float32, shape (elements,), freshly allocated."""
    match payload:
        case DensePayload():
            out = np.empty(payload.elements, np.float32)
            kernels.decode_dense(payload.format, payload.data, out)
        case QuantizedPayload():
            out = np.zeros(payload.elements, np.float32)
            add_payloads([payload], [1.0], out)
    return out


def reduce_payloads(payloads: Sequence[Payload], weights: Sequence[float], out: Float32) -> None:
    """Overwrite `out` with the weighted sum of valid payloads; with zeros if there are none.

    out: float32, shape (elements,), contiguous and writable. Every payload has as many elements.
    Memory is passed over once per run of neighbours of the same kind, so once if all are of one kind.
    """
    out.fill(0.0)
    add_payloads(payloads, weights, out)


def add_payloads(payloads: Sequence[Payload], weights: Sequence[float], out: Float32) -> None:
    """As `reduce_payloads`, but on top of what `out` holds."""
    if len(payloads) != len(weights):
        raise ValueError(
            f"expected one weight per payload, got {len(payloads)} payloads, {len(weights)} weights"
        )
    for payload in payloads:
        if payload.elements != out.size:
            raise ValueError(f"expected payloads of {out.size} elements, got one of {payload.elements}")
    pairs = zip(payloads, weights, strict=True)
    for kind, run in groupby(pairs, key=lambda pair: _kind(pair[0])):
        members = list(run)
        datas = [payload.data for payload, _ in members]
        if isinstance(kind, CodeScheme):
            tables = [level_table(payload, weight) for payload, weight in members]
            kernels.add_quantized(kind, datas, np.stack(tables), out)
        else:
            kernels.add_dense(kind, datas, np.array([weight for _, weight in members], np.float32), out)


def level_table(payload: Payload, weight: float) -> Float32:
    """What each code of a quantized payload is worth: float32, shape (2**bits,), weight included."""
    assert isinstance(payload, QuantizedPayload)
    table = np.zeros(2**payload.scheme.bits, np.float32)
    if payload.scheme is CodeScheme.SIGNED_4BIT:
        table[1:8] = -payload.levels
        table[9:16] = payload.levels
    else:
        table[2] = -payload.levels[0]
        table[3] = payload.levels[0]
    return table * np.float32(weight)


def _kind(payload: Payload) -> CodeScheme | DenseFormat:
    return payload.scheme if isinstance(payload, QuantizedPayload) else payload.format
