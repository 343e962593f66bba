"""The making of a version: sum, aggregate, clip and step the parts, and encode each part's update.

A part is summed and stepped once all pushes that count in it are known: alone (`add`), or with all other
parts that are left (`apply`).

States of a part while a version is made (`PendingVersion`):

    | state   | meaning                                                                     | next          |
    |---------|-----------------------------------------------------------------------------|---------------|
    | open    | Its pushes have not been given; `add` or `apply` will bring them.           | waiting, sent,|
    |         |                                                                             | done          |
    | waiting | Its unit is encoded as one, and some part of that unit is still open.       | sent, done    |
    | sent    | Its update has left. Tensors of which it has the mean coordinates alone are | done          |
    |         | stepped after all known parts have left, so that no worker waits for that.  |               |
    | done    | It is summed, stepped, encoded and sent.                                    |               |
    | failed  | A value is not finite. No other part is stepped, and `apply` raises.        |               |

Must not happen: a part is done twice; the division into parts or their order changes the bits; a version
fails and its values stay (`_roll_back` prevents that). With `clip_norm` all parts are summed before the first
one is stepped.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ...common.parts import Plan
from ...compressors import CompressorSpec, Payload, finite
from ...planning import NORM_VERSIONS, is_measured
from ...proto.manifest import Manifest
from ...proto.replicas import checksum, is_checked
from ...proto.transfer import Pack
from ..job.aggregation import Krum, Mean
from ..job.events import Apply
from .aggregation import combine, least_far
from .clipping import clip, clip_factor
from .compensation import DelayCompensation
from .coordinates import expand_mean, holds_coordinates, mean_coordinates
from .encodings import DownlinkEncoding, held_elements
from .mean import Push, Share, add_up, weights
from .missing import Stretch, absent, filled, ranges, stretches, without
from .norms import SquareNorms
from .pending import RULES, PendingVersion, StepRules
from .store import BuildOptimizer, DivergedError, Float32, Send, Store

Int64 = npt.NDArray[np.int64]


class SteppedStore(Store):
    """A store whose versions are made from pushes. `LocalShard` creates it and uses it on the reducer
    thread."""

    def __init__(
        self,
        manifest: Manifest,
        values: Sequence[Float32],
        downlink: str,
        build_optimizer: BuildOptimizer,
        seed: int = 0,
        rules: StepRules = RULES,
        plan: Plan | None = None,
        compressor: CompressorSpec | None = None,
        pack: Pack | None = None,
    ) -> None:
        """
        Args:
            rules: how a version is made; for the other arguments see `Store`."""
        whole = bool(rules.clip_norm)
        super().__init__(
            *(manifest, values, downlink, build_optimizer, seed, plan),
            whole_gradient=whole,
            compressor=compressor,
            pack=pack,
        )
        self._rules, self._aggregation = rules, rules.aggregation
        self._compensation = DelayCompensation(rules.delay_compensation)
        self._compensation.keep(0, self._downlink.replica, frozenset())
        self.gradient_norm = math.nan  # of the last version before clipping; NaN without clipping
        self._unit_of = _unit_of(self.plan)
        self._step: PendingVersion | None = None
        self._last: torch.Tensor | None = None
        # Square norms by tensor, of the last measured versions at which some tensor had a gradient.
        self._norms: deque[tuple[float, ...]] = deque(maxlen=NORM_VERSIONS)
        self.square_norms: tuple[float, ...] = ()

    def adopt(self, plan: Plan) -> None:
        super().adopt(plan)
        self._step, self._unit_of = None, _unit_of(plan)

    def begin(
        self,
        version: int,
        rate_factor: float,
        learning_rates: Sequence[float] = (),
        base_version: int | None = None,
    ) -> None:
        """Start a new version whose parts will be added.

        Args:
            rate_factor: multiplies the base learning rate of each parameter group.
            learning_rates: learning rates of this step, by parameter group, which replace the multiplied
                ones; empty for none.
            base_version: version that the gradient was computed at, where pushes are applied singly; None for
                the previous version.
        """
        self._step = PendingVersion(version, base_version=base_version)
        if self._rules.takes_norms and is_measured(version - 1 if base_version is None else base_version):
            self._step.norms = SquareNorms(self.plan.starts)
        self._optimizer.follow(rate_factor)
        if learning_rates:
            self._optimizer.learning_rates = list(learning_rates)
        self.settle()  # before the changes of this version are noted

    def add(self, part: int, shares: Sequence[Share], send: Send) -> None:
        """Sum and step one part of the version that `begin` started, before the other parts. The step is
        final. A failure is kept and raised by `apply`.

        Args:
            shares: contribution and payloads of each push that counts in the part, in rank order.
            send: receives each part of the update as soon as it is encoded.
        """
        step = self._step
        if step is None or step.failure is not None:
            return
        try:
            self._add(step, part, shares, send)
            self._take_due(step)
        except Exception as failure:
            step.failure = failure

    def apply(
        self, order: Apply, pushes: Sequence[Push], send: Send, learning_rates: Sequence[float] = ()
    ) -> int:
        """Take one optimizer step for all parts that have not been added, and encode the updates for the
        workers.

        The mean is taken over all samples and summed in the order given. Without samples, or with fewer
        gradients than the aggregation needs, the parameters stay unchanged. If the step fails, the parameters
        become those of the previous version, if a copy is kept, or else those of the replica.

        Args:
            order: version to produce, its contributions, and the weight of the step.
            pushes: payloads of each contribution, by part.
            send: receives each part of the update as soon as it is encoded.
            learning_rates: learning rates of this step, by parameter group; empty for those of the job.

        Returns:
            The number of gradients that had no effect, because the aggregation needs more of them; 0 after a
            step.

        Raises:
            DivergedError: a parameter is not finite any more.
        """
        if self._step is None or self._step.version != order.version:
            self.begin(order.version, order.rate_factor, learning_rates, order.base_version)
        step, self._step = self._step, None
        assert step is not None
        step.weight = order.weight
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
            if self._rules.clip_norm and enough and pairs:
                self._clip(step, shares)
            held = len(pairs)
            del pushes, pairs  # the payloads of a part are freed once it is stepped
            for number in list(shares):
                self._add(step, number, shares.pop(number), send)
            self._take_due(step)
        except Exception:
            self._roll_back(step.before)
            raise
        self._downlink.copy.complete()
        self.version = order.version
        if self.bases is not None:
            self.bases = self.bases.advance({tensor: mean.values for tensor, mean in step.means.items()})
        if is_checked(self.version):
            self.checked = self.version, checksum(self._downlink.replica.numpy())
        if step.norms is not None and any(totals := step.norms.totals()):
            self._norms.append(totals)
            self._average_norms()
        if self._rules.delay_compensation:
            self._compensation.keep(self.version, self._downlink.replica, order.bases)
        return 0 if enough else held

    def undo(self) -> None:
        """Roll back to the last version, if parts of the next one have been stepped and a copy of the
        previous values is kept."""
        step, self._step = self._step, None
        if step is not None and step.before is not self._flat:
            self._roll_back(step.before)

    def _roll_back(self, before: torch.Tensor | None) -> None:
        """Overwrite parameters and replica with the values from before a failed step; None if nothing was
        stepped. No other step follows."""
        self._downlink.copy.drop()
        if before is None:
            return
        replica = self._downlink.replica
        self._flat.copy_(replica if before is self._flat else before)
        if before is not replica:
            replica.copy_(self._flat)

    def _add(self, step: PendingVersion, number: int, shares: Sequence[Share], send: Send) -> None:
        """Sum, step and send a part; if its unit is encoded as one, do so for the whole unit once its last
        part is here."""
        step.taken.add(number)
        index = self._unit_of[number]
        unit = self.plan.units[index]
        if index not in step.piecewise:
            known = [(self.plan.parts[number].start, payloads) for _, payloads in shares]
            step.piecewise[index] = len(unit.parts) == 1 or self._downlink.piecewise(
                unit, known, step.version
            )
        group = {number: shares}
        if not step.piecewise[index]:
            waiting = step.waiting.setdefault(index, {})
            waiting[number] = shares
            if len(waiting) < len(unit.parts):
                return
            group = {part: waiting.pop(part) for part in unit.parts}
        start, end = (self.plan.parts[min(group)].start, self.plan.parts[max(group)].end)
        self._begin_unit(unit)
        self._recall(start, end)
        known = [(self.plan.parts[part].start, payloads) for part in group for _, payloads in group[part]]
        encodings = self._downlink.choose(unit, start, end, known)
        needs_all = self._rules.delay_compensation or self._rules.clip_norm
        sparse = isinstance(self._aggregation, Mean) and not needs_all
        touched = held_elements(encodings) if sparse else None
        for part in group:
            if step.clip is None:
                self._find(part, group[part], step)
        step.due[number] = unit, self._stepped_later(encodings, step)
        for part in group:
            self._step_part(part, group[part], step, touched)
        changed = any([*map(step.found.pop, group)])  # each is popped, because it holds payloads
        for update in self._downlink.encode(
            encodings, list(group), step.version, changed=changed, means=step.means
        ):
            send(self._encode(step.version, update, clip=step.clip))

    def _stepped_later(self, encodings: Sequence[DownlinkEncoding], step: PendingVersion) -> Sequence[int]:
        """Return the tensors of which the update has the mean coordinates alone, so that it need not wait for
        their step. Such a tensor is never divided into parts."""
        if step.clip is not None or self._rules.delay_compensation or step.norms is not None:
            return ()  # these need the gradient itself
        stepped = (each.first for each in encodings if each.stepped)
        return [tensor for tensor in stepped if tensor in step.means and step.means[tensor].alone]

    def _take_due(self, step: PendingVersion) -> None:
        """Step the tensors whose updates have been sent before."""
        for number, (unit, tensors) in step.due.items():
            self._begin_unit(unit)
            for tensor in tensors:
                assert self.bases is not None, "mean coordinates are of tensors with bases"
                gradient = self._gradient_of(*self.plan.starts[tensor : tensor + 2])
                self.bases.expand(tensor, step.means[tensor].values, gradient.numpy())
            self._optimize(number, self._due_in(number, step), step)
        step.due.clear()

    def _due_in(self, number: int, step: PendingVersion) -> list[tuple[int, int]]:
        """Return the ranges of a part's tensors that are due, counted from the beginning of the part."""
        start, (_, tensors) = self.plan.parts[number].start, step.due[number]
        bounds = (self.plan.starts[tensor : tensor + 2] for tensor in tensors)
        return ranges([Stretch(first - start, end - start, ()) for first, end in bounds])

    def _optimize(self, number: int, among: Sequence[tuple[int, int]], step: PendingVersion) -> None:
        """Take the optimizer's step for ranges of a part that have a gradient."""
        if not among:
            return
        if step.before is None:
            step.before = self._before()
        self._optimizer.step(number, among)
        start = self.plan.parts[number].start
        if not all(finite(self._flat[start + first : start + end]) for first, end in among):
            self._refuse(step.version)

    def _step_part(
        self, number: int, shares: Sequence[Share], step: PendingVersion, touched: Int64 | None
    ) -> None:
        """Sum a part and take the optimizer's step for the elements that have a gradient, but not of tensors
        that are due.

        touched: elements that the step can change, in flat order; only these are computed. None for all."""
        part, found = self.plan.parts[number], ranges(step.found[number])
        if touched is not None and found:
            first, last = np.searchsorted(touched, (part.start, part.end))
            self._step_elements(number, touched[first:last] - part.start, shares, step)
            return
        among = without(found, self._due_in(number, step) if number in step.due else ())
        if among and step.clip is None:
            self._sum_part(number, shares, step)
        self._optimize(number, among, step)

    def _stretches(self, shares: Sequence[Share]) -> list[Stretch]:
        """Return the ranges of a part that have a gradient; empty if the pushes are too few for a step."""
        fewest = 1 if isinstance(self._aggregation, Krum) else self._aggregation.fewest
        return stretches([each for _, each in shares]) if len(shares) >= fewest else []

    @staticmethod
    def _factors(shares: Sequence[Share], step: PendingVersion) -> list[float]:
        """Return the weight of each push of a part in their mean."""
        sliced = any(each.slice for each in step.contributions)
        among = step.contributions if sliced else None
        return weights([each for each, _ in shares], step.weight, among)

    def _find(self, number: int, shares: Sequence[Share], step: PendingVersion) -> None:
        """Keep the ranges of a part that have a gradient, and the mean coordinates of its tensors."""
        factors, key = self._factors(shares, step), (self._seed, 0, step.version)
        step.found[number] = self._stretches(shares)
        for stretch in step.found[number]:
            if self.bases is None or not holds_coordinates(stretch.pushes):
                continue
            start = self.plan.parts[number].start + stretch.start
            given = self.bases, self.plan.starts, start, stretch.pushes, factors, key
            try:
                step.means |= mean_coordinates(*given)
            except FloatingPointError as error:
                raise DivergedError(f"{error} at version {step.version}") from None

    def _sum_part(self, number: int, shares: Sequence[Share], step: PendingVersion) -> None:
        """Write the sum of a part's pushes into the gradient, for the elements that have one and are not due;
        call it after `_find`."""
        start, factors = self.plan.parts[number].start, self._factors(shares, step)
        due = {tensor for _, tensors in step.due.values() for tensor in tensors}
        means = {tensor: mean for tensor, mean in step.means.items() if tensor not in due}
        for stretch in step.found[number]:
            here = slice(start + stretch.start, start + stretch.end)
            gradient = self._gradient_of(here.start, here.stop)
            if self.bases is not None and holds_coordinates(stretch.pushes):
                given = means, stretch.pushes, factors, gradient.numpy()
                expand_mean(self.bases, self.plan.starts, here.start, *given)
            else:
                self._sum(stretch, factors, gradient.numpy())
            if step.norms is not None:
                step.norms.add(here.start, gradient.numpy(), stretch.pushes)
            if self._rules.delay_compensation and step.base_version is not None:
                replica, base = self._downlink.replica[here], step.base_version
                self._compensation.correct(gradient, replica, here, base, step.weight)

    def _clip(self, step: PendingVersion, shares: Mapping[int, Sequence[Share]]) -> None:
        """Sum all parts, and clip the gradient of the whole model."""
        for number, of_part in shares.items():
            part = self.plan.parts[number]
            self._find(number, of_part, step)
            if sum(each.end - each.start for each in step.found[number]) < part.elements:
                self._gradient[part.start : part.end] = 0.0
            self._sum_part(number, of_part, step)
        self.gradient_norm = clip(self._gradient, self.plan.starts, self._rules.clip_norm, step.weight)
        step.clip = clip_factor(self.gradient_norm, self._rules.clip_norm)

    def _step_elements(
        self, number: int, places: Int64, shares: Sequence[Share], step: PendingVersion
    ) -> None:
        """Sum and step only the elements of a part that sparse pushes hold, with the same bits as a step of
        the whole part.

        places: these elements, ascending, counted from the beginning of the part."""
        part, factors = self.plan.parts[number], self._factors(shares, step)
        found = ranges(step.found[number])
        gradient = self._gradient_of(part.start, part.end).numpy()
        values = self._flat[part.start : part.end].numpy()
        gradient[places] = 0.0
        for stretch in step.found[number]:
            self._sum(stretch, factors, gradient[stretch.start : stretch.end], keep=True)
            if step.norms is not None:
                first, last = np.searchsorted(places, (stretch.start, stretch.end))
                held = gradient[places[first:last]], stretch.pushes, places[first:last] - stretch.start
                step.norms.add(part.start + stretch.start, *held)
        stepped = torch.from_numpy(values[places])
        if step.before is None:
            step.before = self._before()
        self._optimizer.step_apart(number, stepped, torch.from_numpy(gradient[places]), places, found)
        values[places] = stepped.numpy()
        if not finite(stepped):
            self._refuse(step.version)

    def _sum(self, stretch: Stretch, factors: Sequence[float], out: Float32, *, keep: bool = False) -> None:
        """Write the combined gradient of a range into `out`.

        Args:
            stretch: payloads of the range from each push; an absent one counts as zeros in a mean.
            factors: weight of each push in a mean; unused by other aggregations.
            out: float32, shape (elements of the range,).
            keep: add a mean to the content of `out` instead of overwriting it.
        """
        if isinstance(self._aggregation, Krum):
            add_up(stretch.pushes, [1.0], out)
        elif isinstance(self._aggregation, Mean):
            pairs = zip(stretch.pushes, factors, strict=True)
            held = [(push, factor) for push, factor in pairs if not absent(push)]
            add_up([push for push, _ in held], [factor for _, factor in held], out, keep=keep)
        else:
            combine(self._aggregation, stretch.pushes, out)

    def _before(self) -> torch.Tensor:
        """Return the values to roll back to if the step fails: the replica, which stays unchanged until the
        version is complete; a copy of it if `keep_last` is set and the replica is the parameters."""
        replica = self._downlink.replica
        if self._downlink.copy.separate or not self._rules.keep_last:
            self._last = None
            return replica
        if self._last is None:
            self._last = torch.empty_like(self._flat)
        return self._last.copy_(replica)

    def _average_norms(self) -> None:
        """Set `square_norms` to the mean of the measured versions."""
        self.square_norms = tuple(fmean(each) for each in zip(*self._norms, strict=True))

    def image(self) -> dict[str, Any]:
        return {**super().image(), "bases": self._compensation.image(), "norms": list(self._norms)}

    def restore(self, image: Mapping[str, Any]) -> None:
        super().restore(image)
        self._compensation.restore(image["bases"])
        self._norms = deque(image["norms"], maxlen=NORM_VERSIONS)
        self._average_norms()


def _unit_of(plan: Plan) -> dict[int, int]:
    """Return the index of each part's unit, by part."""
    return {part: index for index, unit in enumerate(plan.units) for part in unit.parts}


def _in_order(push: Push) -> list[Payload]:
    return [payload for part in sorted(push) for payload in push[part]]
