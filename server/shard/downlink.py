"""The downlink: encodes the updates of the workers' replicas.

`replica` is the copy of the parameters that every worker has, bit for bit. With a lossless downlink it is the
parameters themselves. Otherwise an update carries the compressed difference between parameters and replica.
The next update includes all that one update leaves out. The difference is therefore the residual, and error
feedback needs no other state.

`auto` sends nothing for a tensor that has not changed, because no push had a gradient of it. The format
of the update of any other tensor depends on the format in which most pushes hold it:

    | most pushes hold it as | the update holds                                                        |
    |------------------------|-------------------------------------------------------------------------|
    | float32                | the values of the parameters                                            |
    | bfloat16, float16      | differences in that format                                              |
    | linear codes           | differences as `8bit` from 5 bits on, as `4bit` from 2 bits on,         |
    |                        | as `1bit:block=4096` for signs                                          |
    | other codes            | differences as `1bit` or `8bit` for that many bits, otherwise as `4bit` |
    | sparse payloads        | the elements that any push holds: new values if the pushes have float32, |
    |                        | otherwise differences as bfloat16 or float16                            |

Sparse payloads become `4bit` if a step changes other elements too, or if that is smaller. The first sparse
update after a `4bit` one holds all values. Otherwise the residual of an element would wait until a push holds
that element again.

Where the job's compressor has bases (`coordinates`), `auto` sends the mean gradient of a tensor with bases:
its coordinates, or float32 if a push holds the tensor otherwise. Replicas take the optimizer's step
themselves, to the same bits, so nothing is left out and the replica is the parameters there. A downlink that
is given by name encodes the change instead, and the coordinates travel beside it.

Each part is encoded as soon as it has been stepped, unless its encoding depends on other parts of the same
tensor. Then it waits for those. The encoding of a tensor is chosen from its pushes alone, so the division
into parts does not affect the bits.

Compressors are built here without residual, warm-up or other wrapping. A compressor whose error may exceed
its input is refused (`CompressorEntry.downlink`). Neighbouring tensors with the same encoding are sent as one
run. With a lossless downlink, the update to an unchanged version takes a few bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ...common.parts import Plan, Unit
from ...compressors import (
    AbsentPayload,
    CodeFormat,
    CompressorSpec,
    DenseFormat,
    LayerRule,
    Neighbours,
    Payload,
    Random,
    StepContext,
    add_update,
    cut,
    dense_payload,
    join,
    parse_compressor,
    parse_downlink,
    put_update,
    runs_of,
    spanning,
    sparse_payload,
)
from ...proto.manifest import Manifest
from ...proto.messages import Content
from .coordinates import MeanCoordinates
from .encodings import (
    ABSENT,
    FORMATS,
    KINDS,
    SPARSE,
    Coder,
    DownlinkEncoding,
    Held,
    Placed,
    held_by,
    kind_of,
    most,
    most_bytes,
)
from .part_update import PartUpdate, State, update_of, values_of
from .running_magnitude import RunningCoder
from .workers_copy import WorkersCopy

Float32 = npt.NDArray[np.float32]
LARGEST = float(np.finfo(np.float32).max)
RULE = LayerRule()
NO_MEANS: Mapping[int, MeanCoordinates] = {}
STEPPED = "stepped:"  # begins the kind of a tensor that replicas step; its index follows, so none are joined
# The compressors among which `auto` chooses, by kind.
CODERS = {kind: parse_compressor(kind) for kind in KINDS if kind != SPARSE}
# A tensor changes from `4bit` back to sparse updates only if these take at most this share of the `4bit`
# bytes, because the change costs an update of all values.
BACK = 0.5


class Downlink:
    """Encoder of the updates, with the replica and the state of its compressors. The store owns it."""

    def __init__(
        self,
        manifest: Manifest,
        plan: Plan,
        parameters: torch.Tensor,
        compressor: str,
        seed: int,
        *,
        scratch: Callable[[int, int], torch.Tensor],
        leaves_zeros: bool,
        stepped: Collection[int] = (),
        lossy: bool = False,
        changes: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            parameters: the server's parameters, in flat order; they change between calls.
            compressor: compressor of the updates, or `auto`.
            scratch: returns memory for a range of elements of the unit that is encoded. `encode` overwrites
                it, because fresh memory would cost more than the arithmetic. Before that, it holds the
                range's gradient.
            leaves_zeros: whether an optimizer's step leaves elements unchanged whose gradient is 0.
            stepped: indices of the tensors that replicas step; empty unless the compressor is `auto`.
            lossy: True if `auto` will be lossy. The replica then has its memory before the first step, which
                would take long to touch it.
            changes: called before the replica changes."""
        self._specs = manifest.specs
        self._plan = plan
        self._parameters = parameters
        self._scratch = scratch
        self._fixed = parse_downlink(compressor)
        self._seed = seed
        self._leaves_zeros, self._stepped = leaves_zeros, frozenset(stepped)
        self._coders: dict[str, Coder] = {}
        # By tensor: whether the replica has a residual in elements that no push may hold again.
        self._has_residual = [False] * len(manifest.specs)
        self._running_magnitudes = RunningCoder(len(manifest.specs))
        self.copy = WorkersCopy(parameters, changes)
        if lossy if self._fixed is None else not self._fixed.lossless:
            self.copy.split()

    @property
    def replica(self) -> torch.Tensor:
        """The parameters of the last complete version as every worker has them, in flat order."""
        return self.copy.values

    def adopt(self, plan: Plan) -> None:
        """Use another plan from now on. State is kept, because it belongs to tensors."""
        self._plan = plan

    def piecewise(self, unit: Unit, pushes: Sequence[Placed], version: int) -> bool:
        """Return True when a part of a divided tensor can be encoded before the other parts of the tensor are
        known. pushes: position and payloads of the pushes of that part."""
        kind = self._fixed.text if self._fixed is not None else self._kinds(unit, pushes)[0]
        if kind == "4bit" and RULE.compresses(self._specs[unit.first]):
            return self._running_magnitudes.knows(unit.first, version)
        coder = self._fixed or CODERS.get(kind)
        return coder is not None and coder.piecewise

    def choose(self, unit: Unit, start: int, end: int, pushes: Sequence[Placed]) -> list[DownlinkEncoding]:
        """Return the encodings for a range of a unit's elements, ascending. Call it before the step, with the
        pushes of the step.

        Args:
            unit: unit that the elements belong to.
            start: first element in flat order: that of the unit, or of a part of the unit's only tensor.
            end: element after the last one.
            pushes: position and payloads of each push within the range.
        """
        if self._fixed is not None:
            return [DownlinkEncoding(start, end, unit.first, unit.last, self._fixed)]
        encodings: list[DownlinkEncoding] = []
        pairs = enumerate(self._kinds(unit, pushes), unit.first)
        kinds = [f"{STEPPED}{n}" if n in self._stepped and kind != ABSENT else kind for n, kind in pairs]
        borders = np.array(self._plan.starts[unit.first : unit.last + 1], np.int64).clip(start, end)
        held = held_by(pushes, borders) if SPARSE in kinds else None
        of_tensors = zip(range(unit.first, unit.last), kinds, strict=True)
        for kind, group in groupby(of_tensors, key=lambda pair: pair[1]):
            tensors = [tensor for tensor, _ in group]
            if kind.startswith(STEPPED):
                encoding = self._encoding(tensors[0], tensors[0] + 1, start, end, "none")
                encodings.append(replace(encoding, stepped=True))
                continue
            if held is not None and kind == SPARSE:
                encodings += self._sparse_encodings(tensors, unit.first, start, end, held)
                continue
            if kind != ABSENT and (kind == "none" or kind not in FORMATS):
                for tensor in tensors:
                    self._has_residual[tensor] = kind != "none"
            encodings.append(self._encoding(tensors[0], tensors[-1] + 1, start, end, kind))
        encodings = [encoding for encoding in encodings if encoding.start < encoding.end]
        if not all(encoding.compressor is None or encoding.compressor.lossless for encoding in encodings):
            self.copy.split()
        return encodings

    def encode(
        self,
        encodings: Sequence[DownlinkEncoding],
        parts: Sequence[int],
        version: int,
        *,
        changed: bool,
        means: Mapping[int, MeanCoordinates] = NO_MEANS,
    ) -> list[PartUpdate]:
        """Return the updates of some parts after their step; tensors of which the update has the mean's
        coordinates alone may be stepped later. `replica` has the updates once the version is complete.

        Args:
            encodings: encodings of the parts' elements, from `choose`.
            parts: numbers of the parts.
            changed: whether the step has changed any of these parts.
            means: mean coordinates of the version's tensors so far, by index of the tensor.
        """
        done: list[tuple[Payload, Content]] = []
        for encoding in encodings:
            idle = not changed and (self._fixed is None or self._fixed.lossless)
            if idle or encoding.compressor is None:
                done.append((AbsentPayload(elements=encoding.end - encoding.start), Content.DELTA))
                continue
            if encoding.stepped:
                done.append((self._mean_gradient(encoding, means), Content.GRADIENT))
                values = values_of(self._parameters[encoding.start : encoding.end])
                self.copy.change_later(values, encoding.start)
                continue
            scratch = self._scratch(encoding.start, encoding.end)
            content = Content.VALUES if encoding.compressor.lossless else Content.DELTA
            take = put_update if content is Content.VALUES else add_update
            at = encoding.start
            for payload in join(self._payloads(encoding, encoding.compressor, version)):
                self.copy.change(take, payload, at, scratch)
                at += payload.elements
                done.append((payload, content))
        if len(parts) == 1:
            inside = range(encodings[0].first, encodings[-1].last) if changed and encodings else ()
            stepped = {each.first for each in encodings if each.stepped}
            given = {tensor for tensor in stepped if tensor in means and means[tensor].alone}
            beside = [State(n, means[n].payload) for n in inside if n in means and n not in given]
            return [replace(update_of(parts[0], done), beside=beside)]
        ((payload, content),) = done
        start = encodings[0].start
        bounds = [self._plan.parts[part] for part in parts]
        pieces = [cut(payload, bound.start - start, bound.end - start) for bound in bounds]
        return [
            update_of(part, [(piece, content) for piece in each])
            for part, each in zip(parts, pieces, strict=True)
        ]

    def snapshot(self) -> list[PartUpdate]:
        """Return the replica's values as one update for each part."""
        return [
            update_of(
                number,
                [(values_of(self.replica[part.start : part.end]), Content.VALUES)][: part.elements],
            )
            for number, part in enumerate(self._plan.parts)
        ]

    def image(self) -> dict[str, Any]:
        """Return the complete state without the parameters, as plain values and copies of tensors."""
        return {
            "replica": self.replica.clone() if self.copy.separate else None,
            "behind": list(self._has_residual),
            "running": self._running_magnitudes.image(),
            "states": {name: deepcopy(coder.states) for name, coder in self._coders.items()},
        }

    def restore(self, image: Mapping[str, Any]) -> None:
        """Replace the state by one that `image` returned. The image's tensors belong to this object
        afterwards."""
        self.copy.restore(image["replica"])
        self._has_residual = list(image["behind"])
        self._running_magnitudes.restore(image["running"])
        for name, states in image["states"].items():
            self._coder(parse_compressor(name)).states = list(states)

    def _mean_gradient(self, encoding: DownlinkEncoding, means: Mapping[int, MeanCoordinates]) -> Payload:
        """Return the mean gradient of a tensor that was just stepped: coordinates if they are all of it."""
        mean = means.get(encoding.first)
        if mean is not None and mean.alone:
            return mean.payload
        return dense_payload(DenseFormat.FLOAT32, self._scratch(encoding.start, encoding.end).numpy())

    def _payloads(
        self, encoding: DownlinkEncoding, compressor: CompressorSpec, version: int
    ) -> Iterator[Payload]:
        """Yield the payloads of one encoding's range, end to end: values, or differences between parameters
        and replica."""
        here = slice(encoding.start, encoding.end)
        if encoding.held is not None or compressor.text in FORMATS:
            values = self._parameters[here].numpy()
            chosen = values if encoding.held is None else values[encoding.held]
            if not compressor.lossless:
                replica = self.copy.last[here].numpy()
                with np.errstate(over="ignore"):
                    chosen = chosen - (replica if encoding.held is None else replica[encoding.held])
                    np.clip(chosen, -LARGEST, LARGEST, out=chosen)
            dense = dense_payload(FORMATS[compressor.text], chosen)
            yield dense if encoding.held is None else sparse_payload(values.size, encoding.held, dense)
            return
        difference = self._scratch(encoding.start, encoding.end)
        torch.sub(self._parameters[here], self.copy.last[here], out=difference).clamp_(-LARGEST, LARGEST)
        if compressor.text == "4bit":
            yield from self._four_bit(encoding, difference.numpy(), version)
            return
        coder = self._coder(compressor)
        for run in runs_of(coder.chosen, self._specs, encoding.first, encoding.last):
            start, end = self._plan.starts[run.first], self._plan.starts[run.last]
            piece = difference[
                max(start, encoding.start) - encoding.start : min(end, encoding.end) - encoding.start
            ]
            single, context = coder.compressors[run.first], partial(self._context, version, run.first)
            if run.last - run.first > 1 and run.how == "neighbours":
                sizes = np.array([spec.elements for spec in self._specs[run.first : run.last]], np.int64)
                single = spanning(single, Neighbours(sizes, context))
            payload, coder.states[run.first] = single.compress(piece, coder.states[run.first], context(0))
            if payload.elements:
                yield payload

    def _context(self, version: int, first: int, offset: int) -> StepContext:
        """Return the compressor's context for the tensor that is `offset` tensors after `first`."""
        return StepContext(
            samples=1,
            version=version,
            epoch=math.inf,  # past any warm-up, which is for gradients only
            random=Random((self._seed, 0, version, first + offset)),
            shared=Random((self._seed, version, first + offset)),
        )

    def _four_bit(self, encoding: DownlinkEncoding, difference: Float32, version: int) -> Iterator[Payload]:
        """Yield the `4bit` payloads of differences. Neighbouring tensors that the rule compresses share a
        payload; so do neighbours that it leaves as bfloat16."""
        start = encoding.start
        for coded, group in groupby(
            range(encoding.first, encoding.last), key=lambda tensor: RULE.compresses(self._specs[tensor])
        ):
            tensors = list(group)
            end = min(encoding.end, self._plan.starts[tensors[-1] + 1])
            values = difference[start - encoding.start : end - encoding.start]
            if not values.size:
                continue
            if not coded:
                yield dense_payload(DenseFormat.BFLOAT16, values)
            elif len(tensors) == 1:
                begin = start - self._plan.starts[tensors[0]]
                yield self._running_magnitudes.code(tensors[0], begin, values, version)
            else:
                bounds = [self._plan.starts[tensor] - start for tensor in (*tensors, tensors[-1] + 1)]
                pieces = [values[first:last] for first, last in pairwise(bounds)]
                yield self._running_magnitudes.code_together(tensors[0], pieces, version)
            start = end

    def _coder(self, compressor: CompressorSpec) -> Coder:
        """Return the compressor for each tensor, built at the first call."""
        if compressor.text not in self._coders:
            # Wrapping, such as a residual, is for gradients only.
            chosen = [replace(RULE.choose(spec, compressor), wrapping=None) for spec in self._specs]
            made = {each: each.build() for each in set(chosen)}
            found = [made[each] for each in chosen]
            states = [each.init(spec) for each, spec in zip(found, self._specs, strict=True)]
            self._coders[compressor.text] = Coder(chosen, found, states)
        return self._coders[compressor.text]

    # ---- auto

    def _kinds(self, unit: Unit, pushes: Sequence[Placed]) -> list[str]:
        """Return the kind in which most pushes hold each tensor of the unit."""
        if all(len(payloads) == 1 for _, payloads in pushes):
            return [most([kind_of(payloads[0]) for _, payloads in pushes])] * (unit.last - unit.first)
        found: list[list[str]] = []
        for begin, payloads in pushes:
            kinds, remaining = list[str](), iter(payloads)
            payload, end = None, begin
            for tensor in range(unit.first, unit.last):
                at = max(begin, self._plan.starts[tensor])
                while end <= at and (following := next(remaining, None)) is not None:
                    payload, end = following, end + following.elements
                kinds.append("none" if payload is None else kind_of(payload))
            found.append(kinds)
        return [most(kinds) for kinds in zip(*found, strict=True)]

    def _encoding(self, first: int, last: int, start: int, end: int, kind: str) -> DownlinkEncoding:
        """Return the encoding of consecutive tensors in one kind, limited to elements between `start` and
        `end`."""
        starts = self._plan.starts
        compressor = None if kind == ABSENT else CODERS[kind]
        return DownlinkEncoding(max(start, starts[first]), min(end, starts[last]), first, last, compressor)

    def _sparse_encodings(
        self, tensors: Sequence[int], unit_first: int, start: int, end: int, held: Held
    ) -> list[DownlinkEncoding]:
        """Return the encodings of neighbouring tensors of which most pushes are sparse. Each tensor is
        decided by itself; neighbours with the same result share an encoding.

        Args:
            tensors: indices of the tensors, consecutive.
            unit_first: index of the unit's first tensor.
            start: first element of the unit's range, in flat order.
            end: element after the last one.
            held: elements of the unit that the pushes hold.
        """
        decided: list[tuple[str, str]] = []
        for tensor in tensors:
            index = tensor - unit_first
            encoding = self._encoding(tensor, tensor + 1, start, end, ABSENT)
            count = None if held.whole[index] else held.stops[index + 1] - held.stops[index]
            format = held.formats[index]
            kind = self._kind_of_sparse(tensor, encoding.end - encoding.start, count, format)
            decided.append((kind, format if kind == SPARSE else kind))
        encodings: list[DownlinkEncoding] = []
        pairs = zip(tensors, decided, strict=True)
        for (kind, compressor), group in groupby(pairs, key=lambda pair: pair[1]):
            alike = [tensor for tensor, _ in group]
            encoding = self._encoding(alike[0], alike[-1] + 1, start, end, compressor)
            if kind == SPARSE:
                first, last = (held.stops[tensor - unit_first] for tensor in (alike[0], alike[-1] + 1))
                begin = encoding.start - max(start, self._plan.starts[unit_first])
                encoding = replace(encoding, held=held.indices[first:last] - np.uint32(begin))
            encodings.append(encoding)
        return encodings

    def _kind_of_sparse(self, tensor: int, elements: int, count: int | None, format: str) -> str:
        """Return the kind for a tensor, or a piece of one, of which pushes hold `count` elements (None: all);
        record whether the replica then has a residual."""
        has_residual = self._has_residual[tensor]
        limit = self._four_bit_bytes(tensor, elements) * (BACK if has_residual else 1)
        by_elements = self._leaves_zeros and most_bytes(format, elements, count) <= limit
        self._has_residual[tensor] = not by_elements
        if not by_elements:
            return "4bit"
        if has_residual:
            return "none"
        return format if count is None else SPARSE

    def _four_bit_bytes(self, tensor: int, elements: int) -> int:
        """Return the bytes of a tensor's elements as `4bit`, or as bfloat16 where the rule does not compress
        it."""
        coded = RULE.compresses(self._specs[tensor])
        return CodeFormat.SIGNED_4BIT.code_bytes(elements) if coded else 2 * elements
