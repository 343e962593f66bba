"""The way down: what an update of the replicas holds.

`replica` is the copy of the parameters that every worker has, bit for bit. As long as nothing is lost on the
way down it is the parameters themselves. With a compressor an update carries the compressed difference
between the two, so that what one update leaves out is in the next: the difference is the residual, and error
feedback needs no other state.

`auto` sends each update in the kind that most of its pushes came in, each judged by its largest tensor:

    float32               the values of the parameters
    bfloat16, float16     differences in that format
    linear codes          as `8bit` from 5 bits on, otherwise as `4bit`
    other codes           of one bit as `1bit`, otherwise as `4bit`
    sparse                what a push held of each tensor: new values if the pushes had float32, otherwise
                          differences as bfloat16 or float16. As `4bit` if a step changes other elements too,
                          or if that is smaller; the first update after such ones holds all values, or what
                          they left out would wait until a push holds those elements again
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ...compressors import (
    AUTO,
    CodeFormat,
    DenseFormat,
    DensePayload,
    IndexCoding,
    Indices,
    LayerRule,
    LinearPayload,
    ModelCompressor,
    Payload,
    QuantizedPayload,
    SparsePayload,
    add_update,
    decode_indices,
    dense_payload,
    lossless,
    put_update,
    sparse_bytes,
    sparse_payload,
)
from ...proto.manifest import Manifest
from ...proto.messages import Content
from ...proto.shares import share
from .mean import Share

Tensors = Sequence[torch.Tensor]
Float32 = npt.NDArray[np.float32]
LARGEST = float(np.finfo(np.float32).max)
RULE = LayerRule()
FORMATS = {"none": DenseFormat.FLOAT32, "bf16": DenseFormat.BFLOAT16, "fp16": DenseFormat.FLOAT16}
NAMES = {format: name for name, format in FORMATS.items()}
SPARSE = "sparse"
# From `4bit` back to elements only where these take so much of it: that costs an update of all values.
BACK = 0.5
# Of kinds that as many came in, the first decides.
KINDS = (SPARSE, "1bit", "4bit", "8bit", "bf16", "fp16", "none")


@dataclass(frozen=True, slots=True)
class Way:
    """How an update goes down.

    compressor: of the differences; "none": values. indices: by tensor those that a step may change (uint32,
    ascending), None for all; empty: all elements of all tensors.
    """

    compressor: str
    indices: Sequence[Indices | None] = ()


class Downlink:
    def __init__(
        self,
        manifest: Manifest,
        parameters: Tensors,
        compressor: str,
        seed: int,
        *,
        scratch: Tensors,
        leaves_zeros: bool,
    ) -> None:
        """
        Args:
            parameters: of the server, in manifest order; they change between the calls.
            scratch: as many tensors of the same shapes, which `update` may overwrite: new memory of that size
                would cost more than what is done with it.
            compressor: of the updates, or `auto`.
            seed: of the job, for compressors that draw.
            leaves_zeros: whether a step leaves elements alone whose gradient is 0.
        """
        self._specs = manifest.specs
        self._parameters = parameters
        self._scratch = scratch
        self._fixed = None if compressor == AUTO else Way(compressor)
        self._seed = seed
        self._leaves_zeros = leaves_zeros
        self._encoders: dict[str, ModelCompressor] = {}
        self._behind = False  # the replica, in elements that no push may hold again
        self.replica = parameters
        if self._fixed and not lossless(compressor):
            self._encoder(compressor)
            self._separate()

    def choose(self, shares: Sequence[Share]) -> Way:
        """How the update of a step with these pushes goes down. To be called before the step."""
        way = self._fixed or self._matching(shares)
        if not lossless(way.compressor):
            self._separate()
        return way

    def update(self, way: Way, version: int, *, changed: bool) -> tuple[Content, list[Payload]]:
        """The update, which `replica` has taken in. changed: whether there has been a step."""
        if not changed and (self._fixed is None or lossless(way.compressor)):
            return Content.DELTA, [_nothing(spec.elements) for spec in self._specs]
        if lossless(way.compressor):
            payloads = self._some(way) if way.indices else list(map(_values, self._parameters))
            if self.replica is not self._parameters:
                for replica, payload in zip(self.replica, payloads, strict=True):
                    put_update(payload, replica)
            self._behind = self._behind and bool(way.indices)
            return Content.CHANGED if way.indices else Content.VALUES, payloads
        payloads = self._some(way) if way.indices else self._compressed(way, version)
        for replica, payload in zip(self.replica, payloads, strict=True):
            add_update(payload, replica)
        self._behind = self._behind or not way.indices
        return Content.DELTA, payloads

    def snapshot(self) -> list[Payload]:
        """The replica as it is."""
        return list(map(_values, self.replica))

    def _separate(self) -> None:
        """From now on the replica is apart from the parameters."""
        if self.replica is self._parameters:
            self.replica = [parameter.detach().clone() for parameter in self._parameters]

    def _compressed(self, way: Way, version: int) -> list[Payload]:
        for parameter, replica, out in zip(self._parameters, self.replica, self._scratch, strict=True):
            torch.sub(parameter, replica, out=out).clamp_(-LARGEST, LARGEST)
        # A warm-up is for gradients: updates are compressed in full from the first.
        encoder = self._encoder(way.compressor)
        return encoder.compress(self._scratch, 1, version=version, epoch=math.inf)

    def _some(self, way: Way) -> list[Payload]:
        """The elements that a way names, in its format: of the differences, or of the parameters."""
        format, found = FORMATS[way.compressor], list[Payload]()
        for parameter, replica, indices in zip(self._parameters, self.replica, way.indices, strict=True):
            elements, chosen = parameter.numel(), slice(None) if indices is None else indices
            values = _flat(parameter)[chosen]
            if not lossless(way.compressor):
                with np.errstate(over="ignore"):
                    values = np.clip(values - _flat(replica)[chosen], -LARGEST, LARGEST)
            payload = dense_payload(format, values)
            found.append(payload if indices is None else sparse_payload(elements, indices, payload))
        return found

    def _encoder(self, compressor: str) -> ModelCompressor:
        if compressor not in self._encoders:
            found = ModelCompressor(self._specs, compressor, RULE, self._seed, 0, bare=True)
            self._encoders[compressor] = found
        return self._encoders[compressor]

    def _matching(self, shares: Sequence[Share]) -> Way:
        if not shares:
            return Way("none")
        largest = [max(payloads, key=lambda payload: payload.elements) for _, payloads in shares]
        kinds = Counter(map(_kind, largest))
        kind = max(KINDS, key=kinds.__getitem__)
        if kind != SPARSE:
            return Way(kind)
        if self._leaves_zeros:
            held = [self._held(shares, place) for place in range(len(self._specs))]
            way = Way(_value_format(largest), held)
            if self._most_bytes(way) <= self._four_bit_bytes() * (BACK if self._behind else 1):
                return Way("none") if self._behind else way
        return Way("4bit")

    def _held(self, shares: Sequence[Share], place: int) -> Indices | None:
        """The elements of one tensor that pushes hold; None for all."""
        found: list[Indices] = []
        for part, payloads in shares:
            payload = payloads[place]
            if not isinstance(payload, SparsePayload):
                return None
            start = 0
            if part.slices and not part.whole:
                start, _ = share(self._specs[place].elements, part.slice, part.slices)
            found.append(decode_indices(payload) + np.uint32(start))
        merged = np.sort(np.concatenate(found), kind="stable")  # merges what is in order already
        return merged[np.diff(merged, prepend=merged[:1] - 1) != 0] if len(found) > 1 else merged

    def _most_bytes(self, way: Way) -> int:
        size, total = FORMATS[way.compressor].element_bytes, 0
        for spec, held in zip(self._specs, way.indices, strict=True):
            if held is None:
                total += spec.elements * size
            else:
                total += held.size * size + sparse_bytes(spec.elements, held.size)
        return total

    def _four_bit_bytes(self) -> int:
        return sum(
            CodeFormat.SIGNED_4BIT.code_bytes(spec.elements) if RULE.compresses(spec) else 2 * spec.elements
            for spec in self._specs
        )


def _kind(payload: Payload) -> str:
    match payload:
        case DensePayload():
            return NAMES[payload.format]
        case LinearPayload():
            return "8bit" if payload.bits > 4 else "4bit"
        case QuantizedPayload():
            return "1bit" if payload.format.bits == 1 else "4bit"
        case SparsePayload():
            return SPARSE


def _value_format(payloads: Iterable[Payload]) -> str:
    """Of the first sparse push whose values are dense."""
    for payload in payloads:
        if isinstance(payload, SparsePayload) and isinstance(payload.values, DensePayload):
            return NAMES[payload.values.format]
    return "bf16"


def _flat(tensor: torch.Tensor) -> Float32:
    return tensor.detach().view(-1).numpy()


def _values(tensor: torch.Tensor) -> Payload:
    """The tensor as a dense payload over its own memory."""
    values = _flat(tensor)
    return DensePayload(format=DenseFormat.FLOAT32, elements=values.size, data=values.view(np.uint8))


def _nothing(elements: int) -> Payload:
    """Zeros, in a few bytes."""
    nothing = np.empty(0, np.uint8)
    values = DensePayload(format=DenseFormat.BFLOAT16, elements=0, data=nothing)
    return SparsePayload(elements=elements, count=0, coding=IndexCoding.GAPS, values=values, data=nothing)
