"""The parameters: a store sums the pushes of each part, steps it, and encodes its update for the workers.

`parameters` are the server's own, in float32; `downlink` has the replica that every worker has. Nothing here
knows of sockets or clocks. One thread at a time may use a store.

A part, while a version is made (`PendingVersion`):

    open      `add` brings its pushes, or `apply` for all parts that are left. Next: waiting, done.
    waiting   Its unit is encoded as one, and some part of that is open. Next: done.
    done      It is summed, stepped, encoded and sent.
    failed    A value is not finite. Nothing more is stepped, and `apply` raises.

What may not happen: a part is done twice; parts, or the order in which they are done, change the bits; a
version fails and its values stay (`_go_back`). With `clip_norm` all parts are summed before one is stepped.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ...compressors import AbsentPayload, DensePayload, Part, Payload, Plan, decode, finite, wire_bytes
from ...optim.optimizer import Optimizer, OptimizerGroup, Remembered
from ...proto.manifest import Manifest
from ...proto.messages import Content, Update
from ...proto.replicas import checksum, is_checked
from ...proto.transfer import encode_chunks, part_transfer, payload_header
from ...proto.wire import encode_server
from ..job.aggregation import Aggregation, Krum, Mean
from ..job.events import Apply, Contribution
from .aggregation import combine, least_far
from .clipping import clip
from .downlink import Downlink, PartUpdate
from .encodings import Way
from .mean import Push, Share, add_up, weights
from .missing import Stretch, absent, filled, ranges, stretches

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
MEAN = Mean()
BuildOptimizer = Callable[[Sequence[torch.Tensor]], Optimizer]
# For parameters in groups that are stepped so, in elements of the flat order; None for nothing.
Recall = Callable[[Manifest, Sequence[OptimizerGroup]], Sequence[Remembered] | None]


@dataclass(frozen=True, slots=True)
class Encoded:
    """A part of an update as messages, the same for everybody.

    raw_bytes: what its elements take as float32. whole: whether a replica at any version can take it in.
    number: of the part.
    """

    messages: tuple[bytes, ...]
    raw_bytes: int
    whole: bool
    number: int = 0


Send = Callable[[Encoded], None]


@dataclass(frozen=True, slots=True)
class Copy:
    """The parameters of a version, by name, and their SHA-256."""

    version: int
    parameters: Mapping[str, torch.Tensor]
    digest: str


@dataclass(slots=True, eq=False)
class PendingVersion:
    """The state of a version while it is made.

    Attributes:
        before: the values to go back to.
        taken: parts that are not open any more.
        piecewise: by unit, whether its parts are encoded one by one.
        waiting: by unit and part, the pushes of parts that wait.
        summed: by part, its gradient's stretches, where all parts are summed before the first is stepped.
        failure: of a part. The rest is as in `Apply`.
    """

    version: int
    before: torch.Tensor = field(init=False)
    taken: set[int] = field(default_factory=set[int])
    piecewise: dict[int, bool] = field(default_factory=dict[int, bool])
    waiting: dict[int, dict[int, Sequence[Share]]] = field(
        default_factory=dict[int, dict[int, Sequence[Share]]]
    )
    summed: dict[int, list[Stretch]] = field(default_factory=dict[int, list[Stretch]])
    failure: Exception | None = None
    weight: float = 1.0
    base_version: int | None = None
    contributions: Sequence[Contribution] = ()


class DivergedError(ArithmeticError):
    """The parameters have left the range of float32: the training has diverged."""


class Store:
    def __init__(
        self,
        manifest: Manifest,
        values: Sequence[Float32],
        downlink: str,
        build_optimizer: BuildOptimizer,
        seed: int = 0,
        aggregation: Aggregation = MEAN,
        delay_compensation: float = 0.0,
        keep_last: bool = False,
        plan: Plan | None = None,
        clip_norm: float = 0.0,
    ) -> None:
        """
        Args:
            values: initial parameters, a flat float32 array per tensor of the manifest; copied.
            build_optimizer: of the parts of the plan, with the groups of the manifest.
            downlink: compressor of the updates, or `auto`; see `downlink`.
            seed: of the job, for compressors that draw.
            aggregation: how a round's gradients become one.
            delay_compensation: λ of g + λ g² (w - w_base), which makes up to first order for the parameters'
                having moved on since a gradient was computed; 0 for none. Keeps a copy of every version at
                which gradients are being computed. Source: Zheng et al., "Asynchronous Stochastic Gradient
                Descent with Delay Compensation" (ICML 2017).
            plan: how the model is divided; the default one if None.
            keep_last: keep a copy of what every worker has before each step, to go back to if it fails.
            clip_norm: largest Euclidean norm of the gradient of the whole model that a step is taken with, 0
                for no limit. Then no part is stepped before all are summed.
        """
        self._aggregation = aggregation
        self._compensation = delay_compensation
        self._clip_norm = clip_norm
        self.gradient_norm = math.nan  # before it is clipped, of the last version; NaN if it never is
        self.manifest = manifest
        self.plan = plan or manifest.plan()
        self.version = 0
        self._flat = torch.from_numpy(np.concatenate([*values, np.empty(0, np.float32)]))
        self._gradient = torch.zeros_like(self._flat)
        self.parameters = self._by_tensor(self._flat)
        self._optimizer = build_optimizer(self._stepped())
        self._downlink = Downlink(
            *(manifest, self.plan, self._flat, downlink, seed),
            scratch=self._gradient,  # which nobody needs after the step
            leaves_zeros=self._optimizer.leaves_zeros,
        )
        self._unit_of = _unit_of(self.plan)
        self._step: PendingVersion | None = None
        self._keep_last = keep_last
        self._last: torch.Tensor | None = None
        self._bases: dict[int, torch.Tensor] = {}  # by version
        self.checked = 0, 0  # the last version at which the replica's checksum was taken, and that
        self.measures_norms = False  # of the next version
        self.square_norms: tuple[float, ...] = ()
        self._norms: list[float] | None = None  # while they are measured
        if delay_compensation:
            self._keep_base(0, frozenset())

    def _by_tensor(self, flat: torch.Tensor) -> list[torch.Tensor]:
        pairs = zip(self.manifest.specs, pairwise(self.plan.starts), strict=True)
        return [flat[start:end].view(spec.shape) for spec, (start, end) in pairs]

    def _stepped(self) -> list[torch.Tensor]:
        """The optimizer sees parts: its steps are the same for each element, wherever that lies."""
        stepped: list[torch.Tensor] = []
        for part in self.plan.parts:
            stepped.append(self._flat[part.start : part.end])
            stepped[-1].grad = self._gradient[part.start : part.end]
        return stepped

    def adopt(self, plan: Plan) -> None:
        """Divide the model otherwise, between two versions. No bit of any changes by that."""
        self.plan, self._step = plan, None
        self._optimizer.divide(self._stepped(), self.manifest.groups_of_parts(plan))
        self._downlink.adopt(plan)
        self._unit_of = _unit_of(plan)

    def begin(self, version: int, rate_factor: float, learning_rates: Sequence[float] = ()) -> None:
        """The parts of another version are to come.

        learning_rates: of its step, by parameter group, instead of what the factor makes of their own.
        """
        self._step = PendingVersion(version)
        self._norms = [0.0] * len(self.manifest.tensors) if self.measures_norms else None
        self._optimizer.follow(rate_factor)
        if learning_rates:
            self._optimizer.learning_rates = list(learning_rates)
        self._step.before = self._before()

    def add(self, part: int, shares: Sequence[Share], send: Send) -> None:
        """Step one part, once and for all, before the others. Raises DivergedError, and so does `apply`
        then."""
        step = self._step
        if step is None or step.failure is not None:
            return
        try:
            self._add(step, part, shares, send)
        except Exception as failure:
            step.failure = failure

    def apply(
        self, order: Apply, pushes: Sequence[Push], send: Send, learning_rates: Sequence[float] = ()
    ) -> int:
        """Take one optimizer step, and encode what the workers need for it. pushes: of the contributions.
        learning_rates: as in `begin`.

        send: takes each part of the update as soon as it is encoded. Parts that were added before are not
        done again. The mean is one over all samples, summed in the order given (`mean`). Without samples, and
        with fewer gradients than the aggregation needs, the parameters stay as they are. If the step fails,
        they become what they were if that is kept, otherwise what every worker has, as far as the replica is
        apart from them. Returns how many gradients came and had no effect, because they were too few to be
        aggregated as asked.

        Raises:
            DivergedError: the parameters are no longer finite.
        """
        if self._step is None or self._step.version != order.version:
            self.begin(order.version, order.rate_factor, learning_rates)
        step, self._step = self._step, None
        assert step is not None
        step.weight, step.base_version = order.weight, order.base_version
        step.contributions = [each for each in order.contributions if each.samples]
        pairs = [
            (contribution, push)
            for contribution, push in zip(order.contributions, pushes, strict=True)
            if contribution.samples > 0 and contribution.weight != 0
        ]
        enough = len(pairs) >= self._aggregation.fewest
        try:
            if step.failure is not None:
                raise step.failure
            if isinstance(self._aggregation, Krum) and enough:
                everyone = [push for _, push in pairs]
                chosen, push = pairs[least_far(self._aggregation, [_in_order(push) for push in everyone])]
                pairs = [(chosen, filled(push, everyone))]
            shares: dict[int, Sequence[Share]] = {
                number: [(each, push[number]) for each, push in pairs if enough and push.get(number)]
                for number in range(len(self.plan.parts))
                if number not in step.taken
            }
            if self._clip_norm and enough and pairs:
                self._clip(step, shares)
            for number, of_part in shares.items():
                self._add(step, number, of_part, send)
        except Exception:
            self._go_back(step.before)
            raise
        self.version = order.version
        if is_checked(self.version):
            self.checked = self.version, checksum(self._downlink.replica.numpy())
        if self._norms is not None:
            self.square_norms, self._norms, self.measures_norms = tuple(self._norms), None, False
        if self._compensation:
            self._keep_base(order.version, order.bases)
        return 0 if enough else len(pairs)

    def undo(self) -> None:
        """Go back to the last version, if parts of the next one have been stepped and there is a way."""
        step, self._step = self._step, None
        if step is not None and step.taken and step.before is not self._downlink.replica:
            self._go_back(step.before)

    def _go_back(self, before: torch.Tensor) -> None:
        """Have what every worker had before a step that has failed; no other step follows."""
        self._flat.copy_(before)
        if before is not self._downlink.replica:
            self._downlink.replica.copy_(before)

    def _add(self, step: PendingVersion, number: int, shares: Sequence[Share], send: Send) -> None:
        """Step a part, or with the last of its unit all of that."""
        step.taken.add(number)
        place = self._unit_of[number]
        unit = self.plan.units[place]
        if place not in step.piecewise:
            known = [(self.plan.parts[number].start, payloads) for _, payloads in shares]
            step.piecewise[place] = len(unit.parts) == 1 or self._downlink.piecewise(
                unit, known, step.version
            )
        group = {number: shares}
        if not step.piecewise[place]:
            waiting = step.waiting.setdefault(place, {})
            waiting[number] = shares
            if len(waiting) < len(unit.parts):
                return
            group = {part: waiting[part] for part in unit.parts}
        start, end = (self.plan.parts[min(group)].start, self.plan.parts[max(group)].end)
        known = [(self.plan.parts[part].start, payloads) for part in group for _, payloads in group[part]]
        ways = self._downlink.choose(unit, start, end, known)
        changed, touched = False, self._touched(ways)
        for part in group:
            changed |= self._step_part(part, group[part], step, touched)
        for update in self._downlink.encode(ways, list(group), step.version, changed=changed):
            send(self._encode(step.version, update))

    def _touched(self, ways: Sequence[Way]) -> Int64 | None:
        """The elements that a step can change, in flat order, ascending; None where these may be all."""
        ways = [way for way in ways if way.compressor is not None]
        held = [way.held.astype(np.int64) + way.start for way in ways if way.held is not None]
        if not held or len(held) < len(ways) or self._compensation or not isinstance(self._aggregation, Mean):
            return None
        if self._clip_norm:  # it needs all elements
            return None
        return np.concatenate(held)

    def _step_part(
        self, number: int, shares: Sequence[Share], step: PendingVersion, touched: Int64 | None = None
    ) -> bool:
        """Sum a part and take the optimizer's step with what there is of it. Returns whether there was enough
        for one. touched: as `_touched` says; the others are not looked at."""
        found = step.summed[number] if number in step.summed else self._stretches(shares)
        if not found:
            return False
        part = self.plan.parts[number]
        if touched is not None:
            first, last = np.searchsorted(touched, (part.start, part.end))
            self._step_elements(number, touched[first:last] - part.start, shares, found, step)
            return True
        if number not in step.summed:
            self._sum_part(part, shares, found, step)
        self._optimizer.step(number, ranges(found))
        if not finite(self._flat[part.start : part.end]):
            self._refuse(step.version)
        return True

    def _stretches(self, shares: Sequence[Share]) -> list[Stretch]:
        """Return the stretches of a part that have a gradient; none if they are not enough for a step."""
        fewest = 1 if isinstance(self._aggregation, Krum) else self._aggregation.fewest
        return stretches([each for _, each in shares]) if len(shares) >= fewest else []

    @staticmethod
    def _factors(shares: Sequence[Share], step: PendingVersion) -> list[float]:
        """Weights of a part's pushes in their mean."""
        sliced = any(each.slice for each in step.contributions)
        among = step.contributions if sliced else None
        return weights([each for each, _ in shares], step.weight, among)

    def _sum_part(
        self, part: Part, shares: Sequence[Share], found: Sequence[Stretch], step: PendingVersion
    ) -> None:
        """Have the gradient of a part, as far as there is one."""
        factors = self._factors(shares, step)
        for stretch in found:
            here = slice(part.start + stretch.start, part.start + stretch.end)
            self._sum(stretch, factors, self._gradient[here].numpy())
            if self._compensation and step.base_version is not None:
                self._compensate(here, step.base_version, step.weight)
            self._add_norms(here.start, self._gradient[here].numpy())

    def _clip(self, step: PendingVersion, shares: Mapping[int, Sequence[Share]]) -> None:
        """Sum all parts, and clip the gradient of the whole model."""
        for number, of_part in shares.items():
            part, found = self.plan.parts[number], self._stretches(of_part)
            if sum(each.end - each.start for each in found) < part.elements:
                self._gradient[part.start : part.end] = 0.0
            self._sum_part(part, of_part, found, step)
            step.summed[number] = found
        self.gradient_norm = clip(self._gradient, self.plan.starts, self._clip_norm, step.weight)

    def _step_elements(
        self,
        number: int,
        places: Int64,
        shares: Sequence[Share],
        found: Sequence[Stretch],
        step: PendingVersion,
    ) -> None:
        """Sum and step what sparse pushes hold of a part, to the bits that a step of all of it would leave.

        places: of the elements, counted from the beginning of the part.
        """
        part, factors = self.plan.parts[number], self._factors(shares, step)
        gradient, values = (flat[part.start : part.end].numpy() for flat in (self._gradient, self._flat))
        gradient[places] = 0.0
        for stretch in found:
            self._sum(stretch, factors, gradient[stretch.start : stretch.end], keep=True)
        stepped = torch.from_numpy(values[places])
        self._add_norms(part.start, gradient[places], places)
        self._optimizer.step_apart(number, stepped, torch.from_numpy(gradient[places]), places, ranges(found))
        values[places] = stepped.numpy()
        if not finite(stepped):
            self._refuse(step.version)

    def _sum(self, stretch: Stretch, factors: Sequence[float], out: Float32, *, keep: bool = False) -> None:
        """factors: weights in a mean; what a push has nothing of counts as zeros. keep: add it to `out`."""
        if isinstance(self._aggregation, Krum):
            add_up(stretch.pushes, [1.0], out)
        elif isinstance(self._aggregation, Mean):
            pairs = zip(stretch.pushes, factors, strict=True)
            held = [(push, factor) for push, factor in pairs if not absent(push)]
            add_up([push for push, _ in held], [factor for _, factor in held], out, keep=keep)
        else:
            combine(self._aggregation, stretch.pushes, out)

    def _add_norms(self, start: int, gradient: Float32, places: Int64 | None = None) -> None:
        """Add the square norms of a piece of the mean gradient. start: its first element. places: of the
        values in it; None for all."""
        if self._norms is None:
            return
        end = start + (gradient.size if places is None else int(places[-1]) + 1 if places.size else 0)
        starts = self.plan.starts
        place = bisect_right(starts, start) - 1
        while place < len(self._norms) and starts[place] < end:
            borders = np.array([starts[place], starts[place + 1]]) - start
            if places is not None:
                borders = np.searchsorted(places, borders)
            first, last = np.clip(borders, 0, gradient.size)
            piece = gradient[first:last]
            self._norms[place] += float(np.dot(piece, piece))
            place += 1

    def _before(self) -> torch.Tensor:
        """Return the values to go back to: those that every worker has. A copy if that is kept: parts of the
        step may have gone to the workers when another one fails."""
        replica = self._downlink.replica
        if not self._keep_last:
            return replica
        if self._last is None:
            self._last = torch.empty_like(self._flat)
        return self._last.copy_(replica)

    @property
    def replica(self) -> Sequence[torch.Tensor]:
        """The parameters that every worker has, by tensor."""
        return self._by_tensor(self._downlink.replica)

    def _refuse(self, version: int) -> None:
        pairs = zip(self.manifest.specs, self.parameters, strict=True)
        for spec, parameter in pairs:
            if not finite(parameter.view(-1)):
                raise DivergedError(f"parameters of {spec.name!r} are no longer finite at version {version}")

    def _compensate(self, here: slice, base_version: int, weight: float) -> None:
        """Replace weight · g by weight · (g + λ g² (w - w_base))."""
        gradient = self._gradient[here]
        moved = self._downlink.replica[here] - self._bases[base_version][here]
        gradient.add_(moved.mul_(gradient).mul_(gradient), alpha=self._compensation / weight)

    def _keep_base(self, newest: int, bases: frozenset[int]) -> None:
        """Workers may be told to compute at this version; others that nobody computes at are forgotten."""
        for version in list(self._bases):
            if version < newest - 1 and version not in bases:
                del self._bases[version]
        self._bases[newest] = self._downlink.replica.clone()

    def image(self) -> dict[str, Any]:
        """All of it between two versions, as plain values and copies of its tensors: `restore` makes another
        store go on to the same bits."""
        return {
            "version": self.version,
            "parameters": self._flat.clone(),
            "optimizer": self._optimizer.image(),
            "downlink": self._downlink.image(),
            "bases": {version: base.clone() for version, base in self._bases.items()},
            "checked": self.checked,
            "measures_norms": self.measures_norms,
            "square_norms": self.square_norms,
        }

    def restore(self, image: Mapping[str, Any]) -> None:
        """Go on from an `image` of a store with the same manifest, plan and options; takes over its
        tensors."""
        self._flat.copy_(image["parameters"])
        self.version, self.checked = image["version"], image["checked"]
        self._optimizer.restore(image["optimizer"])
        self._downlink.restore(image["downlink"])
        self._bases = dict(image["bases"])
        self.measures_norms, self.square_norms = image["measures_norms"], image["square_norms"]

    def recall(self, remembered: Recall) -> None:
        """Have the optimizer go on from what a checkpoint's remembered, if it fits; `remembered` says so."""
        found = remembered(self.manifest, self._optimizer.groups)
        if found is not None:
            self._optimizer.recall(found)

    def remembered(self) -> Sequence[Remembered]:
        """Return the optimizer's state, in its own memory and in elements of the flat order."""
        return self._optimizer.remembered()

    def snapshot(self) -> list[Encoded]:
        """The replica as it is, for a worker that has none or an old one."""
        return [self._encode(self.version, update) for update in self._downlink.snapshot()]

    def _encode(self, version: int, update: PartUpdate) -> Encoded:
        """The messages of a part of an update."""
        pairs = zip(update.payloads, update.contents, strict=True)
        whole = all(
            content is Content.VALUES and isinstance(payload, DensePayload) for payload, content in pairs
        )
        header = Update(
            version=version,
            part=update.part,
            plan=self.plan.number,
            whole=whole,
            payloads=tuple(map(payload_header, update.payloads, update.contents)),
        )
        transfer = part_transfer(version, update.part)
        chunks = encode_chunks(transfer, [payload.data for payload in update.payloads])
        raw_bytes = 4 * self.plan.parts[update.part].elements
        return Encoded((encode_server(header), *chunks), raw_bytes, whole, update.part)

    def load(self, version: int, values: Sequence[Payload]) -> None:
        """Take over a worker's parameters, and what its optimizer remembers with them."""
        for parameter, payload in zip(self.parameters, values, strict=True):
            _flat(parameter)[:] = decode(payload)
        self.version = version

    def relabel(self, version: int) -> None:
        """Call what is here another version."""
        self.version = version

    def values(self) -> list[Bytes]:
        """Return the replica as little-endian float32 bytes, in manifest order, over its own memory."""
        return [_flat(parameter).view(np.uint8) for parameter in self.replica]

    def sha256(self) -> str:
        """Over the values of the parameters, as every worker has them."""
        digest = hashlib.sha256()
        for tensor, value in zip(self.manifest.tensors, self.values(), strict=True):
            if not tensor.state:
                digest.update(value.data)
        return digest.hexdigest()

    def copy(self) -> Copy:
        """The parameters, as every worker has them."""
        named = zip(self.manifest.tensors, self.replica, strict=True)
        parameters = {tensor.name: each.clone() for tensor, each in named if not tensor.state}
        return Copy(self.version, parameters, self.sha256())


def _unit_of(plan: Plan) -> dict[int, int]:
    """Return the number of each part's unit, by part."""
    return {part: place for place, unit in enumerate(plan.units) for part in unit.parts}


def _flat(tensor: torch.Tensor) -> Float32:
    return tensor.detach().view(-1).numpy()


def _in_order(push: Push) -> list[Payload]:
    return [payload for part in sorted(push) for payload in push[part]]


def compressed_bytes(payloads: Sequence[Payload]) -> tuple[int, int]:
    """Return the bytes of the payloads that are neither dense nor absent, with levels, and the bytes that
    their tensors take as float32."""
    compressed = [payload for payload in payloads if not isinstance(payload, DensePayload | AbsentPayload)]
    return sum(map(wire_bytes, compressed)), sum(payload.elements * 4 for payload in compressed)
