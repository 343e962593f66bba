"""Payloads as their headers announce them: checked against plan and manifest, still without bytes.

The receiver derives every size from the header and the manifest, and refuses a header that does not fit
before it allocates memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from ..common.parts import Part
from ..compressors import (
    AbsentPayload,
    CodeFormat,
    DenseFormat,
    DensePayload,
    IndexCoding,
    LinearPayload,
    Payload,
    PayloadError,
    ProjectedPayload,
    QuantizedPayload,
    SparsePayload,
    ValuePayload,
    check_announcement,
)
from . import messages as m
from .manifest import Manifest
from .messages import (
    AbsentHeader,
    DenseHeader,
    LinearHeader,
    PayloadHeader,
    ProjectedHeader,
    QuantizedHeader,
    SparseHeader,
)
from .refusal import Reason, Refused, refused

# The enums of the wire and those of `compressors` have members of the same names.
_FORMATS = {m.DenseEncoding[format.name]: format for format in DenseFormat}
_CODE_FORMATS = {m.CodeEncoding[format.name]: format for format in CodeFormat}
_CODINGS = {m.IndexEncoding[coding.name]: coding for coding in IndexCoding}
NO_BYTES = np.empty(0, np.uint8)
NO_BASES: Mapping[int, int] = {}


def announced_payloads(
    headers: Sequence[PayloadHeader],
    part: Part,
    manifest: Manifest,
    *,
    worker: str,
    coordinates: Mapping[int, int] = NO_BASES,
) -> list[Payload]:
    """Check the headers of a part's payloads, and return the payloads, still without bytes.

    The payloads must lie end to end over the part's elements, none of them empty. An absent payload must
    stand for whole tensors, as far as they lie in the part. A part without headers contributes nothing; the
    list is empty then. No memory is allocated for the bytes.

    Args:
        coordinates: number of coordinates of each tensor for which the job has bases, by index of the tensor.
            Only these may be projected, as a whole.

    Raises:
        Refused: ELEMENTS or PAYLOAD, naming the tensor.
    """
    total = sum(header.elements for header in headers)
    if not headers:  # the part contributes nothing
        return []
    if total != part.elements or not all(header.elements for header in headers):
        limit, value = f"payloads of {part.elements} elements, none empty", f"{total} elements"
        where = manifest.tensor_at(part.start)
        raise refused(Reason.ELEMENTS, worker=worker, field=f"part from {where}", limit=limit, value=value)
    payloads: list[Payload] = []
    at = part.start
    for header in headers:
        try:
            payloads.append(_empty_payload(header))
        except PayloadError as error:
            raise invalid(error, worker, manifest.tensor_at(at)) from None
        end = at + header.elements
        if isinstance(payloads[-1], ProjectedPayload):
            _check_projected(payloads[-1], at, manifest, coordinates, worker)
        if isinstance(payloads[-1], AbsentPayload):
            for border in (at, end):
                if border not in (part.start, part.end) and not manifest.between_tensors(border):
                    where, limit = (
                        manifest.tensor_at(border),
                        "a tensor that is absent as a whole or not at all",
                    )
                    value = "an absent piece of it"
                    raise refused(Reason.PAYLOAD, worker=worker, field=where, limit=limit, value=value)
        at = end
    return payloads


def _check_projected(
    payload: ProjectedPayload, at: int, manifest: Manifest, coordinates: Mapping[int, int], worker: str
) -> None:
    """Raise Refused unless the payload, from element `at` on, is a whole tensor that has bases, with all of
    its coordinates.
    """
    index = bisect_right(manifest.ends, at)
    whole = manifest.ends[index] - manifest.specs[index].elements, manifest.ends[index]
    limit, value, remedy = f"{coordinates.get(index)} coordinates of the whole tensor", f"{payload.count}", ""
    if index not in coordinates:
        limit, value = "a payload that decodes by itself", "coordinates in bases that the job does not have"
        remedy = "use the job's compressor"
    elif whole != (at, at + payload.elements):
        value = f"those of {payload.elements} elements"
    elif payload.count == coordinates[index]:
        return
    field = manifest.tensor_at(at)
    raise refused(Reason.PAYLOAD, worker=worker, field=field, limit=limit, value=value, remedy=remedy)


def names_of(payloads: Sequence[Payload], part: Part, manifest: Manifest) -> list[str]:
    """Return the name of the tensor in which each payload begins."""
    starts = accumulate((payload.elements for payload in payloads), initial=part.start)
    return [manifest.tensor_at(at) for at, _ in zip(starts, payloads, strict=False)]


def invalid(error: PayloadError, worker: str, field: str) -> Refused:
    """Return the refusal of an invalid payload."""
    reason = Reason.NON_FINITE if "finite" in error.limit else Reason.PAYLOAD
    return refused(
        reason, worker=worker, field=f"{field} {error.field}", limit=error.limit, value=error.value
    )


def _empty_payload(header: PayloadHeader) -> Payload:
    """Return the payload that a header announces, without its bytes. Raise PayloadError if the header is
    invalid.
    """
    payload: Payload
    if isinstance(header.kind, SparseHeader):
        sparse = header.kind
        if sparse.coding not in _CODINGS:
            raise PayloadError("coding", "gaps, bitmap or seeded", str(int(sparse.coding)))
        payload = SparsePayload(
            elements=header.elements,
            count=sparse.count,
            coding=_CODINGS[sparse.coding],
            low_bits=sparse.low_bits,
            index_bytes=sparse.index_bytes,
            seed=sparse.seed,
            values=_empty_values(sparse.values, sparse.count),
            data=NO_BYTES,
        )
    elif isinstance(header.kind, ProjectedHeader):
        projected = header.kind
        payload = ProjectedPayload(
            elements=header.elements,
            values=_empty_values(projected.values, projected.count),
            exponent=projected.exponent,
            data=NO_BYTES,
        )
    elif isinstance(header.kind, AbsentHeader):
        payload = AbsentPayload(elements=header.elements)
    else:
        payload = _empty_values(header.kind, header.elements)
    check_announcement(payload)
    return payload


def _empty_values(header: DenseHeader | QuantizedHeader | LinearHeader | None, elements: int) -> ValuePayload:
    """Return the payload of values that a header announces, without its bytes."""
    match header:
        case DenseHeader(format=code) if code in _FORMATS:
            return DensePayload(format=_FORMATS[code], elements=elements, data=NO_BYTES)
        case QuantizedHeader(format=code, levels=levels, sizes=sizes) if code in _CODE_FORMATS:
            return QuantizedPayload(
                format=_CODE_FORMATS[code],
                elements=elements,
                levels=np.array(levels, np.float32),
                sizes=_block_sizes(sizes, elements),
                data=NO_BYTES,
            )
        case LinearHeader(bits=bits, bucket=bucket):
            return LinearPayload(elements=elements, bits=bits, bucket=bucket, data=NO_BYTES)
        case _:
            expected = "dense, quantized, linear, sparse, projected or absent, of a known format"
            raise PayloadError("kind", expected, "none that this side knows")


def _block_sizes(sizes: Sequence[int], elements: int) -> npt.NDArray[np.int64] | None:
    """Return the sizes of a quantized payload's blocks; None for one block."""
    if not sizes:
        return None
    if max(sizes) > elements:
        raise PayloadError("sizes", f"blocks of at most {elements} elements", str(max(sizes)))
    return np.array(sizes, np.int64)
