"""The mean of pushes that hold tensors as coordinates in the job's bases (`compressors/bases`).

Coordinates are summed as they are, in rank order, and a matrix arises once: from their mean. That mean is
rounded to the form in which it travels to the replicas: 8 bits and a scale for each 128 numbers, rounded at
random without bias, if all pushes have codes; otherwise float16 with an exponent. The server itself uses the
rounded numbers, so each replica that expands them has the same gradient, and the same next bases.

A push may hold such a tensor otherwise: as float32 because of a spike or because its worker leaves, or dense
because its worker says so. Then the mean gradient is the expansion plus these elements.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ...compressors import (
    AUTO,
    AbsentPayload,
    Bases,
    CodeFormat,
    DenseFormat,
    DensePayload,
    LinearPayload,
    ProjectedPayload,
    Random,
    StepContext,
    dense_payload,
    parse_compressor,
    reduce_payloads,
    sum_coordinates,
)
from ...compressors.payload import EXPONENTS, NO_BYTES
from .mean import Float32, Payloads

CODER = parse_compressor("qsgd:bits=8,bucket=128,feedback=off").build()
HALF_EXPONENT = 15  # numbers below 2**15 leave room for rounding below the largest float16


@dataclass(frozen=True, slots=True, eq=False)
class MeanCoordinates:
    """The mean coordinates of a tensor in one version.

    Attributes:
        payload: the coordinates, as replicas receive them.
        values: the same as float32.
        alone: True if the mean gradient is their expansion; False if some push holds elements otherwise.
    """

    payload: ProjectedPayload
    values: Float32
    alone: bool


def stepped_by_replicas(bases: Bases | None, downlink: str) -> frozenset[int]:
    """Return the indices of the tensors of which replicas take the optimizer's step, so that an update has
    the mean gradient's coordinates and no change.

    Coordinates travel in any case, because the bases advance by them: an update without the change is always
    smaller. A downlink that is given by name says how the change is to be sent. bases: the job's; None for a
    compressor without.
    """
    return frozenset(bases.counts) if bases is not None and downlink == AUTO else frozenset()


def described(bases: Bases, stepped: frozenset[int], downlink: str) -> str:
    """Return a text that says what updates have of the tensors with bases. stepped: tensors that replicas
    step."""
    coordinates = 2 * sum(bases.counts.values())
    change = sum(CodeFormat.SIGNED_4BIT.code_bytes(bases.specs[tensor].elements) for tensor in bases.counts)
    if stepped:
        return (
            f"updates of {len(stepped)} tensors are up to {coordinates} bytes of the mean's coordinates, "
            f"without {change} bytes of a change as 4bit: each replica takes the optimizer's step itself"
        )
    return (
        f"updates of {len(bases.counts)} tensors are a change as {downlink} and up to {coordinates} bytes of "
        "coordinates; with --downlink auto they would be the coordinates alone"
    )


def holds_coordinates(pushes: Sequence[Payloads]) -> bool:
    """Return True if some payload of the pushes is projected."""
    return any(isinstance(payload, ProjectedPayload) for push in pushes for payload in push)


def mean_coordinates(
    bases: Bases,
    starts: Sequence[int],
    start: int,
    pushes: Sequence[Payloads],
    factors: Sequence[float],
    key: Sequence[int],
) -> dict[int, MeanCoordinates]:
    """Return the mean coordinates of each tensor that some push holds as such, by its index.

    Args:
        starts: first element of each tensor in flat order, and the number of all elements.
        start: first element of a range, in flat order.
        pushes: payloads of the range from each push, end to end, in rank order.
        factors: factor of each push.
        key: numbers that, with a tensor's index, seed the rounding of its mean.

    Raises:
        FloatingPointError: mean coordinates are not finite; the message names the tensor.
    """
    among: dict[int, list[tuple[ProjectedPayload, float]]] = {}
    otherwise: set[int] = set()
    for payloads, factor in zip(pushes, factors, strict=True):
        at = start
        for payload in payloads:
            first, at = at, at + payload.elements
            if isinstance(payload, ProjectedPayload):
                among.setdefault(bisect_right(starts, first) - 1, []).append((payload, factor))
            elif not isinstance(payload, AbsentPayload):
                otherwise.update(range(bisect_right(starts, first) - 1, bisect_left(starts, at)))
    found: dict[int, MeanCoordinates] = {}
    for tensor, pairs in among.items():
        total = np.empty(bases.counts[tensor], np.float32)
        sum_coordinates([payload for payload, _ in pairs], [factor for _, factor in pairs], total)
        if not np.isfinite(total).all():
            raise FloatingPointError(f"mean coordinates of {bases.specs[tensor].name!r} are not finite")
        coded = not any(isinstance(payload.values, DensePayload) for payload, _ in pairs)
        # One number more than a worker's key has: rank 0 must not round by the same draws.
        context = StepContext(samples=1, version=0, random=Random((*key, tensor, 1)))
        payload = rounded(bases.specs[tensor].elements, total, context if coded else None)
        sum_coordinates([payload], [1.0], total)
        found[tensor] = MeanCoordinates(payload, total, tensor not in otherwise)
    return found


def expand_mean(
    bases: Bases,
    starts: Sequence[int],
    start: int,
    means: Mapping[int, MeanCoordinates],
    pushes: Sequence[Payloads],
    factors: Sequence[float],
    out: Float32,
) -> None:
    """Overwrite `out` with the weighted sum of pushes, some of which hold tensors as coordinates.

    Args:
        means: those that `mean_coordinates` returned; of tensors without one, only other payloads count.
        out: receives the sum: float32, shape (elements of the range,).
    """
    tensors = range(bisect_left(starts, start), bisect_left(starts, start + out.size))
    inside = [tensor for tensor in tensors if tensor in means]
    if sum(starts[tensor + 1] - starts[tensor] for tensor in inside) < out.size:
        out.fill(0.0)
    for tensor in inside:
        here = out[starts[tensor] - start : starts[tensor + 1] - start]
        bases.expand(tensor, means[tensor].values, here)
    for payloads, factor in zip(pushes, factors, strict=True):
        at = 0
        for payload in payloads:
            first, at = at, at + payload.elements
            if not isinstance(payload, ProjectedPayload):
                reduce_payloads([payload], [factor], out[first:at], keep=True)


def rounded(elements: int, coordinates: Float32, context: StepContext | None = None) -> ProjectedPayload:
    """Return coordinates as 8 bits each, or as float16, scaled by a power of two such that neither large nor
    tiny ones are lost.

    Args:
        elements: number of elements of the tensor.
        context: random numbers for rounding to 8 bits; None for float16.
    """
    if context is not None:
        codes, _ = CODER.compress(torch.from_numpy(coordinates), None, context)
        assert isinstance(codes, LinearPayload)
        return ProjectedPayload(elements=elements, values=replace(codes, data=NO_BYTES), data=codes.data)
    largest = float(np.abs(coordinates).max(initial=0.0))
    exponent = math.frexp(largest)[1] - HALF_EXPONENT if largest else 0
    exponent = min(max(exponent, EXPONENTS[0]), EXPONENTS[1])
    values = dense_payload(DenseFormat.FLOAT16, np.ldexp(coordinates, -exponent))
    form = DensePayload(format=DenseFormat.FLOAT16, elements=coordinates.size, data=NO_BYTES)
    return ProjectedPayload(elements=elements, values=form, exponent=exponent, data=values.data)
