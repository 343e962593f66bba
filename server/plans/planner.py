"""The planner: chooses the job's plan by measurements of its workers and its link.

Each worker reports the times of its steps (`Profile`). The arrival times of parts that waited behind another
part give the speed of the link, which all workers share. The shard measures the norms of the mean gradient at
some versions (`planning/norms`, `server/shard/norms`), and a plan takes their mean over the last
`NORM_VERSIONS`.

Deviation from (21) of Li et al. (see `planning/fusion`), which takes the norms of whole gradients: only for
`randk` are the norms estimates of these. With every other sparsifier the shard knows the values that were
sent, which contain residuals, and no unbiased estimate follows from elements chosen by magnitude.

However fast the link is, a part takes at least the time in which the server's processor handles one part
from each worker.

The planner makes the first measured plan from the first profile, another one after `FULL` steps, and later
ones as --replan says.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from ...common.parts import LEAST_BYTES, Plan
from ...planning import Fusion, Layer, Link, Order, Replan, fit, layers_of, make_plan
from ...planning.fusion import Reason, reasons
from ...planning.job import Costs
from ...proto import messages as m
from ...proto.manifest import Manifest
from .rate_control import PartArrival, seconds_per_byte, sending_intervals

FULL = 50  # Steps of a full measurement, as in the paper.
DRIFT = 0.2  # Relative change of a measurement that calls for a new plan.
PARTS_REMEMBERED = 2048  # Number of last arrivals by which the link is measured.
LEAST_PARTS = 8  # Fewest parts for a measurement of the link.


@dataclass(frozen=True, slots=True)
class Measurements:
    """Measurements of a job, as means or medians over its workers.

    Attributes:
        layers: times and sent bytes of each layer, in forward order.
        square_norms: square norm of the mean gradient of each tensor; empty if unknown.
        link: time of the link for each part and each byte, with all workers sending.
        steps: number of measured steps of the worker with the fewest.
        compressing_share: fraction of the time between steps that compressing takes.
        processor_share: fraction of the computation that ran on a processor.
        cores: processor cores of the machine, if server and workers share one; otherwise None.
    """

    layers: tuple[Layer, ...]
    square_norms: tuple[float, ...]
    link: Link
    steps: int
    compressing_share: float
    processor_share: float = 0.0
    cores: int | None = None

    def totals(self) -> tuple[float, ...]:
        """Return the times that are compared to detect a drift, in seconds: computing, sending all bytes,
        starting all parts."""
        sent = sum(layer.sent_bytes for layer in self.layers)
        computing = sum(layer.forward_s + layer.backward_s for layer in self.layers)
        return computing, self.link.seconds(sent), self.link.start_s * len(self.layers)

    def drifted(self, since: Measurements) -> bool:
        """Return True if one of the `totals` differs by more than the fraction `DRIFT` from its value in an
        earlier measurement. A value of less than `DRIFT` of a step counts as that much."""
        pairs = list(zip(self.totals(), since.totals(), strict=True))
        step = sum(max(pair) for pair in pairs)
        return any(abs(now - before) > DRIFT * max(before, DRIFT * step) for now, before in pairs)


class Planner:
    """The measurements of a job, and the plans made from them. `Replanning` calls it; it starts nothing by
    itself. It belongs to one event loop."""

    def __init__(
        self,
        fusion: Fusion,
        order: Order,
        replanning: Replan,
        part_bytes: int = 0,
        *,
        at_once: bool = False,
        machine: str = "",
        cores: int = 1,
    ) -> None:
        """
        Args:
            fusion: rule that joins tensors to units.
            replanning: when a new plan is made.
            part_bytes: size of the largest part, in bytes as float32; 0 for the default.
            at_once: whether workers send nothing before they have all gradients."""
        self._machine, self._cores = machine, cores
        self._fusion, self._order, self._replanning = fusion, order, replanning
        self._part_bytes, self._at_once = part_bytes, at_once
        self._slices, self._least_bytes = 1, LEAST_BYTES
        self._uncut: tuple[int, ...] = ()
        self._profiles: dict[tuple[str, int], m.Profile] = {}  # profiles by worker and incarnation
        self._arrivals: deque[PartArrival] = deque(maxlen=PARTS_REMEMBERED)
        self._planned: tuple[int, Measurements] | None = (
            None  # version of the last measured plan, and its measurements
        )

    @property
    def terms(self) -> tuple[int, int, tuple[int, ...]]:
        """The `slices`, `least_bytes` and `uncut` that were passed to `first`."""
        return self._slices, self._least_bytes, self._uncut

    @property
    def takes_norms(self) -> bool:
        """Whether plans depend on the norms of gradients."""
        return self._fusion.takes_norms

    @property
    def _measures(self) -> bool:
        """Whether plans depend on measurements at all."""
        return self._fusion.measured or self._order.measured

    def first(
        self,
        manifest: Manifest,
        slices: int = 1,
        least_bytes: int = LEAST_BYTES,
        uncut: Collection[int] = (),
    ) -> Plan:
        """Return the plan that is used before anything is measured.

        Args:
            slices: number of slices in which the members of a group divide the parts among themselves.
            least_bytes: lower bound for the default size of the largest part, in bytes as float32.
            uncut: indices of tensors that are in one part each in all plans.
        """
        self._slices, self._least_bytes, self._uncut = slices, least_bytes, tuple(uncut)
        return self._plan(manifest, None)

    def arrived(self, arrival: PartArrival) -> None:
        """Record the arrival of a part."""
        self._arrivals.append(arrival)

    def profiled(self, worker: str, incarnation: int, profile: m.Profile) -> None:
        """Record a worker's profile, in place of its earlier one."""
        self._profiles[worker, incarnation] = profile

    def keep(self, members: Collection[tuple[str, int]]) -> None:
        """Drop the measurements of workers that are not among these members."""
        for name in self._profiles.keys() - set(members):
            del self._profiles[name]
        here = {worker for worker, _ in members}
        if any(each.worker not in here for each in self._arrivals):
            self._arrivals = deque((each for each in self._arrivals if each.worker in here), PARTS_REMEMBERED)

    def due(self, version: int) -> bool:
        """Return True when a new plan is due at a version."""
        if not self._measures or not self._profiles:
            return False
        if self._planned is None:
            return True
        at, measured = self._planned
        steps = min(profile.steps for profile in self._profiles.values())
        if measured.steps < FULL <= steps:
            return True
        if self._replanning.drift:
            return version - at >= FULL and version % FULL == 0
        return bool(self._replanning.every) and version - at >= self._replanning.every

    def measured(self, manifest: Manifest, norms: Sequence[float] = ()) -> Measurements | None:
        """Return the measurements so far; None before the first profile. norms: square norms of the mean
        gradient of each tensor; empty if unknown."""
        profiles = list(self._profiles.values())
        if not profiles:
            return None
        link = self._link()
        if link is None:  # parts do not wait for each other, so the link's time is negligible
            link = Link(start_s=0.0, byte_s=0.0)
        # However fast the link is, the server handles the parts of all workers one after the other.
        senders = max(len(profiles), len({each.worker for each in self._arrivals}))
        link = replace(link, start_s=max(link.start_s, senders * Costs().part_s))
        elements = [spec.elements for spec in manifest.specs]
        densities = [statistics.median(each) for each in zip(*(p.densities for p in profiles), strict=True)]
        kept = [density * count for density, count in zip(densities, elements, strict=True)]
        sent = statistics.median(profile.sent_bytes for profile in profiles)
        per_kept = sent / max(1.0, sum(kept))
        layers = layers_of(
            elements,
            densities,
            sent_bytes=[per_kept * each for each in kept],
            forward_s=_means([profile.forward_seconds for profile in profiles]),
            backward_s=_means([profile.backward_seconds for profile in profiles]),
            square_norms=norms,
        )
        return Measurements(
            tuple(layers),
            tuple(norms),
            link,
            min(profile.steps for profile in profiles),
            statistics.fmean(p.compressing_seconds / max(p.step_seconds, 1e-9) for p in profiles),
            statistics.fmean(profile.processor_share for profile in profiles),
            self._cores if {profile.machine for profile in profiles} == {self._machine} else None,
        )

    def _link(self) -> Link | None:
        """Return the times of the link with all workers sending; None if too few parts have arrived."""
        last: dict[str, PartArrival] = {}
        pairs: list[tuple[int, float]] = []
        for each in self._arrivals:
            before, last[each.worker] = last.get(each.worker), each
            if each.waited and before is not None and each.at > before.at:
                pairs.append((each.size, each.at - before.at))
        link = fit(*zip(*pairs, strict=True)) if len(pairs) >= LEAST_PARTS else None
        if link is None:
            return None
        # Workers share a link unevenly, and the fit is dominated by the fast ones. The bytes of all workers
        # give the capacity.
        sizes = sum(size for size, _ in pairs)
        taken = len(last) * seconds_per_byte(sending_intervals(self._arrivals, -math.inf)) * sizes
        scale = taken / (sum(link.seconds(size) for size, _ in pairs) or 1.0)
        return Link(start_s=scale * link.start_s, byte_s=scale * link.byte_s)

    def plan(self, version: int, manifest: Manifest, measured: Measurements) -> Plan | None:
        """Return the plan that is due at a version; None to keep the present plan, because with --replan
        drift the measurements have not drifted."""
        if self._replanning.drift and self._planned is not None:
            _, before = self._planned
            full = before.steps < FULL <= measured.steps
            if not full and not measured.drifted(before):
                return None
        self._planned = version, measured
        return self._plan(manifest, measured)

    def _plan(self, manifest: Manifest, measured: Measurements | None) -> Plan:
        """Return a plan by the measurements, or without any."""
        return make_plan(
            [spec.elements for spec in manifest.specs],
            self._fusion,
            self._order,
            layers=() if measured is None else self._layers(measured),
            link=None if measured is None else measured.link,
            part_bytes=self._part_bytes,
            slices=self._slices,
            least_bytes=self._least_bytes,
            uncut=self._uncut,
        )

    def reasons(self, measured: Measurements) -> list[Reason | None]:
        """Return for each tensor but the last why SEAMGS does not merge it with the next one; None where it
        does."""
        return reasons(self._layers(measured), measured.link)

    def _layers(self, measured: Measurements) -> tuple[Layer, ...]:
        """Return the measured layers for `make_plan`. If workers send nothing before they have all gradients,
        the backward times are 0, as if all gradients were produced at once."""
        if not self._at_once:
            return measured.layers
        return tuple(replace(layer, backward_s=0.0) for layer in measured.layers)


def alike(plan: Plan, other: Plan) -> bool:
    """Return True when two plans divide the model alike, in the same order; numbers and norms are not
    compared."""
    return replace(plan, number=0, norms=()) == replace(other, number=0, norms=())


def _means(lists: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean of each position over the lists."""
    return [statistics.fmean(each) for each in zip(*lists, strict=True)]
