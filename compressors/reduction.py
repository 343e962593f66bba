"""Decoding of payloads to numbers: of one payload, or of the weighted sum of several.

A server computes the sum in each round. It is accumulated in float32, strictly in the given order:

    out = 0;  for w in order:  out += float32(weights[w]) * decode(payloads[w])

Product and sum are each rounded to float32. The bits of the result therefore depend on the order of the list
and on nothing else: not on the time at which a payload arrived, on threads, or on the processor. The weight
is multiplied into the few levels or scales of a quantized payload rather than into its elements. For levels
that is the same product; for a scale it is float32(float32(weight) * scale) times the integer code.

Votes (`CodeFormat.VOTE`) are the exception. Neighbouring votes are counted, each as one regardless of its
weight. They add the sign of the majority, or 0 where there is none, times the sum of weight * level.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, groupby, pairwise

import numpy as np
import torch

from . import kernels
from .indices import decode_indices
from .payload import (
    AbsentPayload,
    CodeFormat,
    DenseFormat,
    DensePayload,
    Float32,
    Int64,
    LinearPayload,
    Payload,
    ProjectedPayload,
    QuantizedPayload,
    SparsePayload,
    ValuePayload,
    payload_bytes,
)


def decode(payload: Payload) -> Float32:
    """Return the values of a valid payload: float32, shape (elements,), newly allocated."""
    out = np.empty(payload.elements, np.float32)
    _decode_to(payload, out)
    return out


def _decode_to(payload: Payload, out: Float32) -> None:
    if isinstance(payload, DensePayload):
        kernels.cpu.decode_dense(payload.format, payload.data, out)
    else:
        reduce_payloads([payload], [1.0], out)


def add_update(payload: Payload, parameter: torch.Tensor) -> None:
    """Add an update to a parameter, in place, on any device.

    Server and workers compute the same bits. Elements that a sparse update does not hold are not touched, nor
    are absent ones, because adding 0 would turn -0 into 0.
    """
    if isinstance(payload, AbsentPayload):
        return
    if _plain(parameter):
        reduce_payloads([payload], [1.0], parameter.detach().view(-1).numpy(), keep=True)
    elif isinstance(payload, SparsePayload):
        _change(payload, parameter, _added)
    else:
        parameter.add_(torch.from_numpy(decode(payload)).view(parameter.shape).to(parameter.device))


def put_update(payload: Payload, parameter: torch.Tensor) -> None:
    """Overwrite a parameter with the values of an update, in place, on any device.

    Elements that a sparse update does not hold are not touched, nor are absent ones.
    """
    if isinstance(payload, AbsentPayload):
        return
    if isinstance(payload, SparsePayload):
        _change(payload, parameter, lambda flat, indices, values: flat.index_copy_(0, indices, values))
    elif _plain(parameter):
        _decode_to(payload, parameter.detach().view(-1).numpy())
    else:
        parameter.copy_(torch.from_numpy(decode(payload)).view(parameter.shape))


def _added(flat: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> None:
    # Not `index_add_`: on a GPU that adds by atomics, which flush the smallest numbers to zero.
    flat.index_copy_(0, indices, flat[indices] + values)


def _plain(parameter: torch.Tensor) -> bool:
    return parameter.device.type == "cpu" and parameter.is_contiguous()


def _change(
    payload: SparsePayload,
    parameter: torch.Tensor,
    how: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object],
) -> None:
    """Apply `how(flat, indices, values)` to a parameter, with the elements of a sparse payload."""
    flat = parameter.detach().reshape(-1)  # a copy if it is not contiguous
    indices = torch.from_numpy(decode_indices(payload).astype(np.int64))
    values = torch.from_numpy(decode(payload.value_payload()))
    how(flat, indices.to(flat.device), values.to(flat.device))
    if flat.data_ptr() != parameter.data_ptr():
        parameter.copy_(flat.view(parameter.shape))


def reduce_payloads(
    payloads: Sequence[Payload], weights: Sequence[float], out: Float32, *, keep: bool = False
) -> None:
    """Write the weighted sum of valid payloads to `out`, or add it with `keep`; without payloads it is 0.

    Neighbouring payloads of the same kind are added in one pass over memory. Sparse payloads are added one by
    one, and touch their own elements only. Absent ones add nothing.

    Args:
        payloads: payloads of `out.size` elements each, in the order of the sum.
        weights: one for each payload.
        out: float32, shape (elements,), contiguous and writable.
        keep: True to add the sum to the present contents of `out`; False to overwrite them.

    Raises:
        ValueError: shapes, types or lengths do not match, or a payload is projected: its elements need bases.
    """
    if out.dtype != np.float32 or out.ndim != 1 or not out.flags.c_contiguous or not out.flags.writeable:
        got = f"{out.dtype} of shape {out.shape}"
        raise ValueError(f"out: expected writable contiguous float32 of one dimension, got {got}")
    if len(payloads) != len(weights):
        counts = f"{len(payloads)} payloads and {len(weights)} weights"
        raise ValueError(f"expected one weight per payload, got {counts}")
    for payload in payloads:
        if isinstance(payload, ProjectedPayload):
            raise ValueError("expected payloads that decode by themselves, got coordinates in bases")
        if payload.elements != out.size:
            raise ValueError(f"expected payloads of {out.size} elements, got one of {payload.elements}")
        if payload.data.size != payload_bytes(payload):
            raise ValueError(f"expected {payload_bytes(payload)} bytes of data, got {payload.data.size}")
    weighted = zip(payloads, weights, strict=True)
    pairs = [
        (each, weight) for each, weight in weighted if not isinstance(each, AbsentPayload | ProjectedPayload)
    ]
    if not pairs and not keep:
        out.fill(0.0)
    for _, run in groupby(pairs, key=lambda pair: _kind(pair[0])):
        members = list(run)
        factors = np.array([weight for _, weight in members], np.float32)
        _add_run([payload for payload, _ in members], factors, out, keep=keep)
        keep = True  # only the first run overwrites


def sum_coordinates(
    payloads: Sequence[ProjectedPayload], weights: Sequence[float], out: Float32, *, keep: bool = False
) -> None:
    """Write the weighted sum of coordinates to `out`, or add it with `keep`, as `reduce_payloads` does.

    Args:
        payloads: coordinates in the same bases, `out.size` of each payload, in the order of the sum.
        weights: one for each payload; a weight times 2**exponent is rounded to float32.
        out: float32, shape (count,), contiguous and writable.
        keep: True to add the sum to the present contents of `out`; False to overwrite them.

    Raises:
        ValueError: shapes, types or lengths do not match.
    """
    pairs = zip(payloads, weights, strict=True)
    scaled = [math.ldexp(weight, payload.exponent) for payload, weight in pairs]
    reduce_payloads([payload.value_payload() for payload in payloads], scaled, out, keep=keep)


def sums_of_coordinates(tensors: Sequence[Sequence[ProjectedPayload]], weight: float) -> list[Float32]:
    """Return the sum of each tensor's payloads, at least one, times `weight`, as `sum_coordinates` does.

    Tensors whose payloads are linear codes of one form take one call together.
    """
    found = [np.empty(0, np.float32)] * len(tensors)
    alike: dict[tuple[int, int, int], list[int]] = {}
    for index, sent in enumerate(tensors):
        forms = [each.values for each in sent]
        first = forms[0]
        if isinstance(first, LinearPayload) and all(
            each is first
            or (isinstance(each, LinearPayload) and (each.bits, each.bucket) == (first.bits, first.bucket))
            for each in forms
        ):
            alike.setdefault((len(sent), first.bits, first.bucket), []).append(index)
        else:
            found[index] = np.empty(sent[0].count, np.float32)
            sum_coordinates(sent, [weight] * len(sent), found[index])
    for (payloads, bits, bucket), indices in alike.items():
        counts = [tensors[index][0].count for index in indices]
        datas = [
            np.concatenate([tensors[index][number].data for index in indices]) for number in range(payloads)
        ]
        sums = kernels.linear.add_each(bits, bucket, counts, datas, np.full(payloads, weight, np.float32))
        for index, (start, end) in zip(indices, pairwise(accumulate(counts, initial=0)), strict=True):
            found[index] = sums[start:end]
    return found


# Neighbours with equal keys are added in one pass. For codes the key is the format and the sizes of blocks,
# but for votes the format alone, because all votes have to be counted together.
_Kind = DenseFormat | CodeFormat | tuple[CodeFormat, bytes] | tuple[int, int] | type[SparsePayload]


def _kind(payload: ValuePayload | SparsePayload) -> _Kind:
    match payload:
        case DensePayload():
            return payload.format
        case QuantizedPayload():
            votes = payload.format is CodeFormat.VOTE
            return payload.format if votes else (payload.format, payload.block_sizes().tobytes())
        case LinearPayload():
            return payload.bits, payload.bucket
        case SparsePayload():
            return SparsePayload


def _add_run(
    payloads: Sequence[ValuePayload | SparsePayload], weights: Float32, out: Float32, *, keep: bool
) -> None:
    match payloads[0]:
        case DensePayload(format=format):
            kernels.cpu.add_dense(format, [payload.data for payload in payloads], weights, out, keep=keep)
        case QuantizedPayload(format=format):
            add = _add_votes if format is CodeFormat.VOTE else _add_quantized
            add([each for each in payloads if isinstance(each, QuantizedPayload)], weights, out, keep=keep)
        case LinearPayload(bits=bits, bucket=bucket):
            linear = [payload for payload in payloads if isinstance(payload, LinearPayload)]
            codes, scales = [payload.codes() for payload in linear], [payload.scales() for payload in linear]
            kernels.linear.add_linear(bits, bucket, codes, scales, weights, out, keep=keep)
        case SparsePayload():
            sparse = [payload for payload in payloads if isinstance(payload, SparsePayload)]
            _add_sparse(sparse, weights, out, keep=keep)


def _add_sparse(payloads: Sequence[SparsePayload], weights: Float32, out: Float32, *, keep: bool) -> None:
    if not keep:
        out.fill(0.0)
    # One after another, because decoded payloads need more memory than encoded ones.
    for payload, weight in zip(payloads, weights, strict=True):
        indices, values = decode_indices(payload), decode(payload.value_payload())
        kernels.sparse.add_sparse([indices], [values], np.array([weight], np.float32), out)


def _add_quantized(
    payloads: Sequence[QuantizedPayload], weights: Float32, out: Float32, *, keep: bool
) -> None:
    """Add payloads of equal formats and blocks."""
    format, sizes = payloads[0].format, payloads[0].block_sizes()
    levels = np.concatenate([payload.levels for payload in payloads])
    shape = len(payloads), sizes.size, 2**format.bits
    tables = format.tables(levels).reshape(shape) * weights[:, None, None]
    datas = [payload.data for payload in payloads]
    kernels.cpu.add_quantized(format, datas, tables, out, keep=keep, sizes=sizes)


def _add_votes(payloads: Sequence[QuantizedPayload], weights: Float32, out: Float32, *, keep: bool) -> None:
    # Votes are counted in whole numbers, which float32 holds exactly, so that a draw gives exactly 0.
    count = np.zeros_like(out)
    signs = np.array([-1, 1], np.float32)
    starts: list[Int64] = []
    for _, run in groupby(payloads, key=lambda payload: payload.block_sizes().tobytes()):
        alike = list(run)
        sizes = alike[0].block_sizes()
        tables = np.tile(signs, (len(alike), sizes.size, 1))
        datas = [payload.data for payload in alike]
        kernels.cpu.add_quantized(CodeFormat.VOTE, datas, tables, count, sizes=sizes)
        starts += [np.cumsum(sizes) - sizes] * len(alike)
    np.sign(count, out=count)
    # The mean of the levels changes where a block of any payload begins.
    borders = np.unique(np.concatenate([*starts, [0, out.size]]))
    for begin, end in pairwise(borders.tolist()):
        levels = [
            payload.levels[np.searchsorted(start, begin, "right") - 1]
            for payload, start in zip(payloads, starts, strict=True)
        ]
        level = math.fsum(weights.astype(np.float64) * levels)
        count[begin:end] *= np.float32(min(level, float(kernels.FLOAT32_MAX)))
    if keep:
        out += count
    else:
        out[:] = count
