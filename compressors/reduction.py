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
from .payload import CodeScheme, DenseFormat, DensePayload, Float32, Payload, QuantizedPayload, payload_bytes


def decode(payload: Payload) -> Float32:
    """The values of a valid payload: float32, shape (elements,), freshly allocated."""
    out = np.empty(payload.elements, np.float32)
    match payload:
        case DensePayload():
            kernels.decode_dense(payload.format, payload.data, out)
        case QuantizedPayload():
            reduce_payloads([payload], [1.0], out)
    return out


def reduce_payloads(payloads: Sequence[Payload], weights: Sequence[float], out: Float32) -> None:
    """Overwrite `out` with the weighted sum of valid payloads; with zeros if there are none.

    out: float32, shape (elements,), contiguous and writable. Every payload has as many elements.
    Memory is passed over once per run of neighbours of the same kind, so once if all are of one kind.
    """
    if not payloads:
        out.fill(0.0)
    _accumulate(payloads, weights, out, keep=False)


def add_payloads(payloads: Sequence[Payload], weights: Sequence[float], out: Float32) -> None:
    """As `reduce_payloads`, but on top of what `out` holds."""
    _accumulate(payloads, weights, out, keep=True)


def _accumulate(payloads: Sequence[Payload], weights: Sequence[float], out: Float32, *, keep: bool) -> None:
    if out.dtype != np.float32 or out.ndim != 1 or not out.flags.c_contiguous or not out.flags.writeable:
        got = f"{out.dtype} of shape {out.shape}"
        raise ValueError(f"out: expected writable contiguous float32 of one dimension, got {got}")
    if len(payloads) != len(weights):
        counts = f"{len(payloads)} payloads and {len(weights)} weights"
        raise ValueError(f"expected one weight per payload, got {counts}")
    for payload in payloads:
        if payload.elements != out.size:
            raise ValueError(f"expected payloads of {out.size} elements, got one of {payload.elements}")
        if payload.data.size != payload_bytes(payload):
            raise ValueError(f"expected {payload_bytes(payload)} bytes of data, got {payload.data.size}")
    pairs = zip(payloads, weights, strict=True)
    for kind, run in groupby(pairs, key=lambda pair: _kind(pair[0])):
        members = list(run)
        datas = [payload.data for payload, _ in members]
        factors = np.array([weight for _, weight in members], np.float32)
        if isinstance(kind, CodeScheme):
            tables = [kind.table(p.levels) for p, _ in members if isinstance(p, QuantizedPayload)]
            kernels.add_quantized(kind, datas, np.stack(tables) * factors[:, None], out, keep=keep)
        else:
            kernels.add_dense(kind, datas, factors, out, keep=keep)
        keep = True


def _kind(payload: Payload) -> CodeScheme | DenseFormat:
    return payload.scheme if isinstance(payload, QuantizedPayload) else payload.format
