"""Entries of a model's state_dict besides the trainable parameters.

They are buffers, frozen parameters, and tied entries, which are other names without values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..common.naming import shown, why_no_label
from .messages import Entry, EntryKind, Tensor
from .refusal import Reason, Refused, refused

MAX_DIMENSIONS = 16
MAX_ELEMENTS = 1 << 40  # far above any model; bounds the products of hostile shapes
SHAPE_LIMIT = f"up to {MAX_DIMENSIONS} dimensions of up to {MAX_ELEMENTS}"
MAX_NAME_CHARACTERS = 1024
NOT_A_NAME = "__metadata__"
DIGEST_BYTES = 32
ITEM_BYTES = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "float32"), 4),
    **dict.fromkeys(("int64", "float64", "complex64"), 8),
}


def is_shape(shape: Sequence[int]) -> bool:
    """Return True if the shape has at most 16 dimensions of at most 2**40 elements."""
    return len(shape) <= MAX_DIMENSIONS and all(size <= MAX_ELEMENTS for size in shape)


def check_label(name: str, kind: str, worker: str) -> None:
    """Raise Refused: NAME if the name of a tensor or entry cannot be written to every file and log.

    Args:
        kind: "tensor" or "entry", for the message.
    """
    if name == NOT_A_NAME or why_no_label(name, MAX_NAME_CHARACTERS):
        raise refused(
            Reason.NAME,
            worker=worker,
            field=f"{kind} name",
            limit=f"1 to {MAX_NAME_CHARACTERS} printable characters without spaces around them, and not "
            f"{NOT_A_NAME}, which safetensors reserves",
            value=shown(name),
            remedy="rename it in the model",
        )


def entry_bytes(entry: Entry) -> int:
    """Return the bytes of an entry's value on the wire; 0 for one without."""
    return math.prod(entry.shape) * ITEM_BYTES[entry.dtype] if has_value(entry) else 0


def has_value(entry: Entry) -> bool:
    """Return False for an entry without a value on the wire: a tied one, or a frozen parameter that stays at
    the workers."""
    return entry.kind is not EntryKind.TIED and not entry.digest


def of_kind(entries: Sequence[Entry], *, frozen: bool) -> list[Entry]:
    """Return the entries that are buffers, preceded by the frozen parameters with values if `frozen`."""
    buffers = [entry for entry in entries if entry.kind is EntryKind.BUFFER]
    sent = [entry for entry in entries if entry.kind is EntryKind.FROZEN and has_value(entry)]
    return (sent if frozen else []) + buffers


def check_entries(
    entries: Sequence[Entry], tensors: Sequence[Tensor], *, worker: str, max_bytes: int
) -> None:
    """Check the entries of a manifest.

    Args:
        tensors: tensors of the same manifest, whose names are taken.
        max_bytes: limit for the bytes of all values.

    Raises:
        Refused: TENSOR, DTYPE, SHAPE, SIZE or NAME, naming the entry.
    """
    names = {tensor.name for tensor in tensors}
    total = 0

    def refuse(reason: Reason, entry: Entry, limit: str, value: str, remedy: str = "") -> Refused:
        field = f"entry {entry.name!r}"
        return refused(reason, worker=worker, field=field, limit=limit, value=value, remedy=remedy)

    for entry in entries:
        if not entry.name or entry.name in names:
            raise refuse(Reason.TENSOR, entry, "a name of its own", "an empty or repeated one")
        check_label(entry.name, "entry", worker)
        if entry.kind is EntryKind.UNSPECIFIED:
            raise refuse(Reason.TENSOR, entry, "a buffer, a frozen parameter or a tied one", "another kind")
        if entry.digest and (entry.kind is not EntryKind.FROZEN or len(entry.digest) != DIGEST_BYTES):
            limit, value = f"a digest of {DIGEST_BYTES} bytes, of a frozen parameter", entry.kind.label
            raise refuse(Reason.TENSOR, entry, limit, f"{len(entry.digest)} bytes, of a {value}")
        if entry.kind is EntryKind.TIED:
            if entry.tied_to not in names or entry.shape or entry.dtype:
                limit = "no shape and dtype, and the name of a tensor or entry before it"
                raise refuse(Reason.TENSOR, entry, limit, repr(entry.tied_to))
        elif entry.dtype not in ITEM_BYTES:
            raise refuse(Reason.DTYPE, entry, f"one of {', '.join(ITEM_BYTES)}", entry.dtype or "no dtype")
        elif not is_shape(entry.shape):
            raise refuse(Reason.SHAPE, entry, SHAPE_LIMIT, str(entry.shape))
        else:
            total += entry_bytes(entry)
            if total > max_bytes:
                remedy = "start the server with a larger --max-model-bytes"
                value = f"{total} bytes"
                raise refuse(Reason.SIZE, entry, f"{max_bytes} bytes up to here", value, remedy)
        names.add(entry.name)
