"""The way down: what an update of the replicas holds.

`replica` is the copy of the parameters that every worker has, bit for bit. As long as nothing is lost on the
way down it is the parameters themselves. With a compressor an update carries the compressed difference
between the two, so that what one update leaves out is in the next: the difference is the residual, and error
feedback needs no other state.

`auto` sends nothing of a tensor that no push has a gradient of: it has not changed. Any other it sends in the
kind that most pushes of it came in:

    float32               the values of the parameters
    bfloat16, float16     differences in that format
    linear codes          as `8bit` from 5 bits on, otherwise as `4bit`
    other codes           of one bit as `1bit`, of eight as `8bit`, otherwise as `4bit`
    sparse                what any push held of it: new values if the pushes had float32, otherwise
                          differences as bfloat16 or float16. As `4bit` if a step changes other elements too,
                          or if that is smaller; the first update after such ones holds all values, or what
                          they left out would wait until a push holds those elements again

Each part is encoded as soon as it has been stepped, unless that takes to know all of a tensor that is cut
into several: then it waits for them. What a tensor is sent as is decided from its pushes alone, so the parts
have no say in the bits.

Compressors are made bare here, with nothing around them, and one that may err by more than it is given is
refused (`CompressorEntry.downlink`). Neighbours that are sent alike go down as one run. Without loss, the
update to a version at which nothing changed takes a few bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ...compressors import (
    AbsentPayload,
    CodeFormat,
    Compressor,
    CompressorSpec,
    DenseFormat,
    DensePayload,
    LayerRule,
    Neighbours,
    Payload,
    Plan,
    Random,
    StepContext,
    Unit,
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
from .encodings import ABSENT, FORMATS, KINDS, SPARSE, Held, Placed, Way, held_by, kind_of, most, most_bytes
from .running_magnitude import RunningCoder

Float32 = npt.NDArray[np.float32]
LARGEST = float(np.finfo(np.float32).max)
RULE = LayerRule()
# What `auto` chooses among, by kind.
CODERS = {kind: parse_compressor(kind) for kind in KINDS if kind != SPARSE}
# From `4bit` back to elements only where these take so much of it: that costs an update of all values.
BACK = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class PartUpdate:
    """The update of a part: payloads, end to end, and what a replica does with each."""

    part: int
    payloads: Sequence[Payload]
    contents: Sequence[Content]


@dataclass(slots=True)
class _Coder:
    """A compressor for each tensor, as declared and as built, with what it remembers."""

    chosen: list[CompressorSpec]
    compressors: list[Compressor]
    states: list[Any] = field(default_factory=list[Any])


class Downlink:
    def __init__(
        self,
        manifest: Manifest,
        plan: Plan,
        parameters: torch.Tensor,
        compressor: str,
        seed: int,
        *,
        scratch: torch.Tensor,
        leaves_zeros: bool,
    ) -> None:
        """
        Args:
            parameters: of the server, in flat order; they change between the calls.
            scratch: as much memory, of which `encode` may overwrite what belongs to its part: new memory of
                that size would cost more than what is done with it.
            compressor: of the updates, or `auto`.
            seed: of the job, for compressors that draw.
            leaves_zeros: whether a step leaves elements alone whose gradient is 0.
        """
        self._specs = manifest.specs
        self._plan = plan
        self._parameters = parameters
        self._scratch = scratch
        self._fixed = parse_downlink(compressor)
        self._seed = seed
        self._leaves_zeros = leaves_zeros
        self._coders: dict[str, _Coder] = {}
        # By tensor: whether the replica is behind in elements that no push may hold again.
        self._behind = [False] * len(manifest.specs)
        self._running = RunningCoder(len(manifest.specs), _largest(plan))
        self.replica = parameters
        if self._fixed and not self._fixed.lossless:
            self._separate()

    def adopt(self, plan: Plan) -> None:
        """Go by another plan: what is remembered is that of tensors."""
        self._plan = plan
        self._running.adopt(_largest(plan))

    def piecewise(self, unit: Unit, pushes: Sequence[Placed], version: int) -> bool:
        """Whether a part of a tensor that is cut into several can go down before the others are known, as far
        as the pushes of that part tell."""
        kind = self._fixed.text if self._fixed is not None else self._kinds(unit, pushes)[0]
        if kind == "4bit" and RULE.compresses(self._specs[unit.first]):
            return self._running.knows(unit.first, version)
        coder = self._fixed or CODERS.get(kind)
        return coder is not None and coder.piecewise

    def choose(self, unit: Unit, start: int, end: int, pushes: Sequence[Placed]) -> list[Way]:
        """How elements of a unit go down after a step with these pushes. To be called before the step.

        start, end: in flat order; all of the unit, or a part of its only tensor. pushes: of these elements.
        """
        if self._fixed is not None:
            return [Way(start, end, unit.first, unit.last, self._fixed)]
        ways: list[Way] = []
        kinds = self._kinds(unit, pushes)
        borders = np.array(self._plan.starts[unit.first : unit.last + 1], np.int64).clip(start, end)
        held = held_by(pushes, borders) if SPARSE in kinds else None
        of_tensors = zip(range(unit.first, unit.last), kinds, strict=True)
        for kind, group in groupby(of_tensors, key=lambda pair: pair[1]):
            tensors = [tensor for tensor, _ in group]
            if held is not None and kind == SPARSE:
                ways += self._ways_of_sparse(tensors, unit.first, start, end, held)
                continue
            if kind != ABSENT and (kind == "none" or kind not in FORMATS):
                for tensor in tensors:
                    self._behind[tensor] = kind != "none"
            ways.append(self._way(tensors[0], tensors[-1] + 1, start, end, kind))
        ways = [way for way in ways if way.start < way.end]
        if not all(way.compressor is None or way.compressor.lossless for way in ways):
            self._separate()
        return ways

    def encode(
        self, ways: Sequence[Way], parts: Sequence[int], version: int, *, changed: bool
    ) -> list[PartUpdate]:
        """The updates of some parts, which `replica` has taken in. ways: of their elements. changed: whether
        there has been a step."""
        done: list[tuple[Payload, Content]] = []
        for way in ways:
            idle = not changed and (self._fixed is None or self._fixed.lossless)
            if idle or way.compressor is None:
                done.append((AbsentPayload(elements=way.end - way.start), Content.DELTA))
                continue
            content = Content.VALUES if way.compressor.lossless else Content.DELTA
            take = put_update if content is Content.VALUES else add_update
            at = way.start
            for payload in join(self._payloads(way, way.compressor, version)):
                if content is Content.DELTA or self.replica is not self._parameters:
                    take(payload, self.replica[at : at + payload.elements])
                at += payload.elements
                done.append((payload, content))
        if len(parts) == 1:
            return [_update(parts[0], done)]
        ((payload, content),) = done
        start = ways[0].start
        bounds = [self._plan.parts[part] for part in parts]
        pieces = [cut(payload, bound.start - start, bound.end - start) for bound in bounds]
        return [
            _update(part, [(piece, content) for piece in each])
            for part, each in zip(parts, pieces, strict=True)
        ]

    def snapshot(self) -> list[PartUpdate]:
        return [
            _update(
                number, [(_values(self.replica[part.start : part.end]), Content.VALUES)] * bool(part.elements)
            )
            for number, part in enumerate(self._plan.parts)
        ]

    def image(self) -> dict[str, Any]:
        """Return all state but the parameters, as plain values and copies of tensors."""
        apart = self.replica is not self._parameters
        return {
            "replica": self.replica.clone() if apart else None,
            "behind": list(self._behind),
            "running": self._running.image(),
            "states": {name: deepcopy(coder.states) for name, coder in self._coders.items()},
        }

    def restore(self, image: Mapping[str, Any]) -> None:
        """Go on from an `image`; takes over its tensors."""
        self.replica = self._parameters if image["replica"] is None else image["replica"]
        self._behind = list(image["behind"])
        self._running.restore(image["running"])
        for name, states in image["states"].items():
            self._coder(parse_compressor(name)).states = list(states)

    def _separate(self) -> None:
        """From now on the replica is apart from the parameters."""
        if self.replica is self._parameters:
            self.replica = self._parameters.detach().clone()

    def _payloads(self, way: Way, compressor: CompressorSpec, version: int) -> Iterator[Payload]:
        here = slice(way.start, way.end)
        if way.held is not None or compressor.text in FORMATS:
            values = self._parameters[here].numpy()
            chosen = values if way.held is None else values[way.held]
            if not compressor.lossless:
                replica = self.replica[here].numpy()
                with np.errstate(over="ignore"):
                    chosen = chosen - (replica if way.held is None else replica[way.held])
                    np.clip(chosen, -LARGEST, LARGEST, out=chosen)
            dense = dense_payload(FORMATS[compressor.text], chosen)
            yield dense if way.held is None else sparse_payload(values.size, way.held, dense)
            return
        difference = self._scratch[here]
        torch.sub(self._parameters[here], self.replica[here], out=difference).clamp_(-LARGEST, LARGEST)
        if compressor.text == "4bit":
            yield from self._four_bit(way, difference.numpy(), version)
            return
        coder = self._coder(compressor)
        for run in runs_of(coder.chosen, self._specs, way.first, way.last):
            start, end = self._plan.starts[run.first], self._plan.starts[run.last]
            piece = difference[max(start, way.start) - way.start : min(end, way.end) - way.start]
            single, context = coder.compressors[run.first], partial(self._context, version, run.first)
            if run.last - run.first > 1 and run.how == "neighbours":
                sizes = np.array([spec.elements for spec in self._specs[run.first : run.last]], np.int64)
                single = spanning(single, Neighbours(sizes, context))
            payload, coder.states[run.first] = single.compress(piece, coder.states[run.first], context(0))
            if payload.elements:
                yield payload

    def _context(self, version: int, first: int, place: int) -> StepContext:
        """Return the context of the tensor `place` places after the first."""
        return StepContext(
            samples=1,
            version=version,
            epoch=math.inf,  # a warm-up is for gradients: updates are compressed in full from the first
            random=Random((self._seed, 0, version, first + place)),
            shared=Random((self._seed, version, first + place)),
        )

    def _four_bit(self, way: Way, difference: Float32, version: int) -> Iterator[Payload]:
        """Neighbours that are coded are one payload, and so are those that the rule leaves as bfloat16."""
        start = way.start
        for coded, group in groupby(
            range(way.first, way.last), key=lambda tensor: RULE.compresses(self._specs[tensor])
        ):
            tensors = list(group)
            end = min(way.end, self._plan.starts[tensors[-1] + 1])
            values = difference[start - way.start : end - way.start]
            if not values.size:
                continue
            if not coded:
                yield dense_payload(DenseFormat.BFLOAT16, values)
            elif len(tensors) == 1:
                begin = start - self._plan.starts[tensors[0]]
                yield self._running.code(tensors[0], begin, values, version)
            else:
                bounds = [self._plan.starts[tensor] - start for tensor in (*tensors, tensors[-1] + 1)]
                pieces = [values[first:last] for first, last in pairwise(bounds)]
                yield self._running.code_together(tensors[0], pieces, version)
            start = end

    def _coder(self, compressor: CompressorSpec) -> _Coder:
        if compressor.text not in self._coders:
            chosen = [replace(RULE.choose(spec, compressor), wrapping=None) for spec in self._specs]
            made = {each: each.build() for each in set(chosen)}  # what goes around is not for updates
            found = [made[each] for each in chosen]
            states = [each.init(spec) for each, spec in zip(found, self._specs, strict=True)]
            self._coders[compressor.text] = _Coder(chosen, found, states)
        return self._coders[compressor.text]

    # ---- auto

    def _kinds(self, unit: Unit, pushes: Sequence[Placed]) -> list[str]:
        """Return, by tensor, the kind that most pushes send it as."""
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

    def _way(self, first: int, last: int, start: int, end: int, kind: str) -> Way:
        """Return the way of tensors, as far as they lie between `start` and `end`."""
        starts = self._plan.starts
        compressor = None if kind == ABSENT else CODERS[kind]
        return Way(max(start, starts[first]), min(end, starts[last]), first, last, compressor)

    def _ways_of_sparse(
        self, tensors: Sequence[int], unit_first: int, start: int, end: int, held: Held
    ) -> list[Way]:
        """Choose for neighbours of which most pushes hold some elements: for each tensor by itself, with one
        way for those in a row that are alike. held: of the unit, whose first tensor is `unit_first`."""
        decided: list[tuple[str, str]] = []
        for tensor in tensors:
            place = tensor - unit_first
            way = self._way(tensor, tensor + 1, start, end, ABSENT)
            count = None if held.whole[place] else held.stops[place + 1] - held.stops[place]
            format = held.formats[place]
            kind = self._kind_of_sparse(tensor, way.end - way.start, count, format)
            decided.append((kind, format if kind == SPARSE else kind))
        ways: list[Way] = []
        pairs = zip(tensors, decided, strict=True)
        for (kind, compressor), group in groupby(pairs, key=lambda pair: pair[1]):
            alike = [tensor for tensor, _ in group]
            way = self._way(alike[0], alike[-1] + 1, start, end, compressor)
            if kind == SPARSE:
                first, last = (held.stops[tensor - unit_first] for tensor in (alike[0], alike[-1] + 1))
                begin = way.start - max(start, self._plan.starts[unit_first])
                way = replace(way, held=held.indices[first:last] - np.uint32(begin))
            ways.append(way)
        return ways

    def _kind_of_sparse(self, tensor: int, elements: int, count: int | None, format: str) -> str:
        """Return the kind of a tensor, or a piece of one, of which pushes hold `count` elements; None for
        all."""
        behind = self._behind[tensor]
        limit = self._four_bit_bytes(tensor, elements) * (BACK if behind else 1)
        by_elements = self._leaves_zeros and most_bytes(format, elements, count) <= limit
        self._behind[tensor] = not by_elements
        if not by_elements:
            return "4bit"
        if behind:
            return "none"
        return format if count is None else SPARSE

    def _four_bit_bytes(self, tensor: int, elements: int) -> int:
        coded = RULE.compresses(self._specs[tensor])
        return CodeFormat.SIGNED_4BIT.code_bytes(elements) if coded else 2 * elements


def _largest(plan: Plan) -> int:
    """Elements of the largest unit."""
    return max(unit.end - unit.start for unit in plan.units)


def _update(part: int, done: Sequence[tuple[Payload, Content]]) -> PartUpdate:
    return PartUpdate(part, [payload for payload, _ in done], [content for _, content in done])


def _values(values: torch.Tensor) -> Payload:
    """Values as a dense payload over their own memory."""
    array = values.numpy()
    return DensePayload(format=DenseFormat.FLOAT32, elements=array.size, data=array.view(np.uint8))
