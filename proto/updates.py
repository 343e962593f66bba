"""The bytes of an update: the payloads of a part's elements, then state of the job beside them.

Only jobs whose compressor has bases (`compressors/bases`) have such state. An update has, of a tensor with
bases, those of these that a replica needs:

    | beside            | for                                                                         |
    |-------------------|-----------------------------------------------------------------------------|
    | coordinates       | advancing the bases, where the payload of the elements is not a gradient in |
    |                   | coordinates itself                                                          |
    | bases             | a snapshot                                                                  |
    | optimizer's state | a snapshot, where replicas take the optimizer's step                        |
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass

from ..common.parts import Part
from ..compressors import DenseFormat, DensePayload, Payload
from ..optim.steps import COUNT
from . import messages as m
from .announced import NO_BYTES, announced_payloads, names_of
from .manifest import Manifest
from .refusal import Reason, Refused, refused
from .transfer import Assembly, part_transfer
from .wire import CHUNK_BYTES

BASES = "bases"


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedSizes:
    """The sizes of a job's state beside the values.

    Attributes:
        coordinates: number of coordinates of each tensor with bases, by index of the tensor.
        bases: number of elements of the bases of these tensors.
        memory: names of the state that the optimizer keeps of an element, and of its number of steps.
    """

    coordinates: Mapping[int, int]
    bases: Mapping[int, int]
    memory: Set[str]


NOTHING_SHARED = SharedSizes(coordinates={}, bases={}, memory=frozenset())


def update_assembly(
    update: m.Update, part: Part, manifest: Manifest, shared: SharedSizes, *, worker: str
) -> Assembly:
    """Check the header of a part of an update, and return an assembly for its bytes.

    These are the part's payloads, then one for each of `update.beside`.

    Raises:
        Refused: ELEMENTS, PAYLOAD or GROUP, before memory is allocated.
    """
    payloads = announced_payloads(
        update.payloads, part, manifest, worker=worker, coordinates=shared.coordinates
    )
    names = names_of(payloads, part, manifest)
    _check_gradients(update, part, manifest, shared, worker)
    seen: set[tuple[int, str, int]] = set()
    for each in update.beside:
        if (each.tensor, each.name, each.start) in seen:
            raise _refuse(manifest, each, "each state once", "a repeated one", worker)
        seen.add((each.tensor, each.name, each.start))
        payloads.append(_beside(each, manifest, shared, worker))
        names.append(f"tensor {manifest.specs[each.tensor].name!r}")
    transfer = part_transfer(update.version, update.part)
    return Assembly(transfer, payloads, chunk_bytes=CHUNK_BYTES, worker=worker, names=names)


def _check_gradients(
    update: m.Update, part: Part, manifest: Manifest, shared: SharedSizes, worker: str
) -> None:
    """Raise Refused unless each gradient is that of a whole tensor with bases, and comes with learning
    rates."""
    whole = {(manifest.ends[i] - manifest.specs[i].elements, manifest.ends[i]) for i in shared.bases}
    at = part.start
    for header in update.payloads:
        start, at = at, at + header.elements
        field, rates, clip = manifest.tensor_at(start), update.learning_rates, update.clip
        if header.content is not m.Content.GRADIENT:
            if isinstance(header.kind, m.ProjectedHeader):
                limit, value = "coordinates of a gradient", f"coordinates of {header.content.name}"
                raise refused(Reason.PAYLOAD, worker=worker, field=field, limit=limit, value=value)
            continue
        if (start, at) not in whole:
            limit, value = "a gradient of a whole tensor with bases", "another one"
            raise refused(Reason.PAYLOAD, worker=worker, field=field, limit=limit, value=value)
        groups = max(1, len(manifest.groups))
        finite = all(map(math.isfinite, (*rates, 1.0 if clip is None else clip)))
        if len(rates) not in (1, groups) or not finite:
            limit, value = f"1 or {groups} finite learning rates", f"{len(rates)}, or infinite ones"
            raise refused(Reason.GROUP, worker=worker, field=field, limit=limit, value=value)


def _beside(each: m.Beside, manifest: Manifest, shared: SharedSizes, worker: str) -> Payload:
    """Return the announced payload of one state. Raises Refused if the job does not have it, or in another
    size."""
    header, size = each.payload, shared.bases.get(each.tensor)
    if size is None:
        raise refused(
            Reason.PAYLOAD,
            worker=worker,
            field=f"tensor {each.tensor} of an update",
            limit="one with bases",
            value=f"state {each.name!r}",
        )
    elements, end = manifest.specs[each.tensor].elements, manifest.ends[each.tensor]
    if not each.name:
        whole = Part(end - elements, end)
        (payload,) = announced_payloads(
            [header], whole, manifest, worker=worker, coordinates=shared.coordinates
        )
        return payload
    if each.name in shared.memory and 0 <= each.start < each.end <= elements:
        size = 1 if each.name == COUNT else each.end - each.start
    elif each.name != BASES:
        limit = f"one of {sorted({BASES, *shared.memory})}, of elements up to {elements}"
        value = f"{each.name!r} of {each.start} to {each.end}"
        raise _refuse(manifest, each, limit, value, worker)
    dense = isinstance(header.kind, m.DenseHeader) and header.kind.format is m.DenseEncoding.FLOAT32
    if not dense or header.elements != size:
        value = f"{header.elements} in {type(header.kind).__name__}"
        raise _refuse(manifest, each, f"{size} float32 numbers", value, worker)
    return DensePayload(format=DenseFormat.FLOAT32, elements=size, data=NO_BYTES)


def _refuse(manifest: Manifest, each: m.Beside, limit: str, value: str, worker: str) -> Refused:
    field = f"state {each.name!r} of tensor {manifest.specs[each.tensor].name!r}"
    return refused(Reason.PAYLOAD, worker=worker, field=field, limit=limit, value=value)
