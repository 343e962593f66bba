"""Which plan the job should have, from what its workers and its link have shown.

What is measured: each worker says what its steps are made of (`Profile`); how long parts take that came
behind another one gives the link, of which all workers together had as much as there was; the norms of the
mean gradient come from the shard, which measures them in the one version before a plan is made. However fast
the link is, a part takes at least what the server's processor does for one from each worker. A plan is made
as soon as the first worker has said something, again after its first `FULL` steps, and then as --replan says.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from ...compressors import LEAST_BYTES, Plan
from ...planning import Fusion, Layer, Link, Merging, Order, Replan, fit, layers_of, make_plan
from ...planning.job import Costs
from ...proto import messages as m
from ...proto.manifest import Manifest
from .rate_control import Came, seconds_per_byte, sendings

FULL = 50  # steps, over which the paper measures
DRIFT = 0.2  # of what was measured, is another job to plan for
PARTS_REMEMBERED = 2048
LEAST_PARTS = 8  # to know the link by


@dataclass(frozen=True, slots=True)
class Measurements:
    """layers: in forward order. square_norms: of the mean gradient of each tensor, also of those that are not
    sparse; empty if not known. steps: that they were measured over. compressing_share: of the time from
    step to step. processor_share: of the computation, that took a processor. cores: of the one machine that
    all are on; None for a machine for each."""

    layers: tuple[Layer, ...]
    square_norms: tuple[float, ...]
    link: Link
    steps: int
    compressing_share: float
    processor_share: float = 0.0
    cores: int | None = None

    def totals(self) -> tuple[float, ...]:
        """What a drift is seen by."""
        sent = sum(layer.sent_bytes for layer in self.layers)
        computing = sum(layer.forward_s + layer.backward_s for layer in self.layers)
        return computing, self.link.seconds(sent), self.link.start_s * len(self.layers)

    def drifted(self, since: Measurements) -> bool:
        pairs = list(zip(self.totals(), since.totals(), strict=True))
        step = sum(max(pair) for pair in pairs)
        return any(abs(now - before) > DRIFT * max(before, DRIFT * step) for now, before in pairs)


class Planner:
    """Belongs to one event loop, and does nothing by itself."""

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
            at_once: workers send nothing before they have all gradients.
            machine, cores: that the server is on.
        """
        self._machine, self._cores = machine, cores
        self._fusion, self._order, self._replanning = fusion, order, replanning
        self._part_bytes, self._at_once = part_bytes, at_once
        self._slices, self._least_bytes = 1, LEAST_BYTES
        self._profiles: dict[tuple[str, int], m.Profile] = {}  # by worker and incarnation
        self._came: deque[Came] = deque(maxlen=PARTS_REMEMBERED)
        self._planned: tuple[int, Measurements] | None = None  # at which version, by what

    @property
    def terms(self) -> tuple[int, int]:
        """Slices and least bytes, as in `first`."""
        return self._slices, self._least_bytes

    @property
    def takes_norms(self) -> bool:
        """Whether plans depend on the norms of gradients."""
        return self._fusion.merging is Merging.SEAMGS

    @property
    def _measures(self) -> bool:
        return self._fusion.measured or self._order.measured

    def first(self, manifest: Manifest, slices: int = 1, least_bytes: int = LEAST_BYTES) -> Plan:
        """Before anything is known. The rest is as in `compressors.divide`."""
        self._slices, self._least_bytes = slices, least_bytes
        return self._plan(manifest, None)

    def arrived(self, came: Came) -> None:
        """A part is there."""
        self._came.append(came)

    def profiled(self, worker: str, incarnation: int, profile: m.Profile) -> None:
        self._profiles[worker, incarnation] = profile

    def keep(self, members: Collection[tuple[str, int]]) -> None:
        """All others are gone, or not here."""
        for name in self._profiles.keys() - set(members):
            del self._profiles[name]
        here = {worker for worker, _ in members}
        if any(each.worker not in here for each in self._came):
            self._came = deque((each for each in self._came if each.worker in here), PARTS_REMEMBERED)

    def due(self, version: int) -> bool:
        """Whether a plan is to be made at a version, if enough is known."""
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
        """What is known by now; None before the first worker has said something. norms: of the mean gradient
        of each tensor, squared."""
        profiles = list(self._profiles.values())
        if not profiles:
            return None
        link = self._link()
        if link is None:  # where parts do not wait for one another, the link takes no time that counts
            link = Link(start_s=0.0, byte_s=0.0)
        # However fast the link is, the server takes a part in from each worker, one after the other.
        senders = max(len(profiles), len({each.worker for each in self._came}))
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
            groups=[tensor.group for tensor in manifest.tensors],
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
        """While all workers send; None if too little has come."""
        last: dict[str, Came] = {}
        pairs: list[tuple[int, float]] = []
        for each in self._came:
            before, last[each.worker] = last.get(each.worker), each
            if each.waited and before is not None and each.at > before.at:
                pairs.append((each.size, each.at - before.at))
        link = fit(*zip(*pairs, strict=True)) if len(pairs) >= LEAST_PARTS else None
        if link is None:
            return None
        # Workers do not share a link evenly, and the median is of those that had more of it: how much there
        # is shows in what came from all of them.
        sizes = sum(size for size, _ in pairs)
        taken = len(last) * seconds_per_byte(sendings(self._came, -math.inf)) * sizes
        scale = taken / (sum(link.seconds(size) for size, _ in pairs) or 1.0)
        return Link(start_s=scale * link.start_s, byte_s=scale * link.byte_s)

    def plan(self, version: int, manifest: Manifest, measured: Measurements) -> Plan | None:
        """At a version at which one is due. None if that before may stay."""
        if self._replanning.drift and self._planned is not None:
            _, before = self._planned
            full = before.steps < FULL <= measured.steps
            if not full and not measured.drifted(before):
                return None
        self._planned = version, measured
        return self._plan(manifest, measured)

    def _plan(self, manifest: Manifest, measured: Measurements | None) -> Plan:
        """measured: None if nothing is."""
        return make_plan(
            [spec.elements for spec in manifest.specs],
            self._fusion,
            self._order,
            layers=() if measured is None else self._as_sent(measured.layers),
            link=None if measured is None else measured.link,
            part_bytes=self._part_bytes,
            slices=self._slices,
            groups=[tensor.group for tensor in manifest.tensors],
            least_bytes=self._least_bytes,
        )

    def _as_sent(self, layers: Sequence[Layer]) -> Sequence[Layer]:
        return [replace(layer, backward_s=0.0) for layer in layers] if self._at_once else layers


def alike(plan: Plan, other: Plan) -> bool:
    """Whether two plans divide the model alike, in the same order. Norms are the job's, not the planner's."""
    return replace(plan, number=0, norms=()) == replace(other, number=0, norms=())


def _means(lists: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.fmean(each) for each in zip(*lists, strict=True)]
