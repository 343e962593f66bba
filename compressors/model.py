"""A whole model's gradients: one compressor and one state per tensor, and payloads by part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..planning.parts import Plan, divide
from .base import TensorSpec, is_choosing, is_model_wide
from .draft import LOSSLESS
from .feedback import ErrorFeedback, without_feedback
from .layers import LayerRule
from .ledger import Ledger
from .payload import Payload
from .registry import create, wrapping_of
from .runs import checks, runs_of
from .sparse import Sparse
from .step import Step
from .wrapping import Wrapping


class ModelCompressor:
    """Compresses a model's gradients step by step; `ledger` keeps what must be kept between steps.

    Not for use by several threads at once. Two of them made alike and fed alike produce the same bits,
    whatever the plan and the order in which gradients come.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        compressor_spec: str,
        rule: LayerRule,
        seed: int,
        rank: int,
        *,
        plan: Plan | None = None,
        numbers: Sequence[int] | None = None,
    ) -> None:
        """
        Args:
            specs: the model's tensors, in the order in which gradients will be given.
            compressor_spec: `name[:key=value,...]`.
            rule: which tensors it applies to.
            seed: of the job, at least 0. It goes into every step's random numbers, and so does the rank.
            rank: of this worker, at least 0; it may be changed between steps. No two workers of a round may
                have the same.
            plan: how the model is divided; the default one if None.
            numbers: by tensor, what goes into its random numbers: at least 0, each once; its place if None.

        Raises:
            SpecError: there is no such compressor.
        """
        create(compressor_spec)  # a bad spec is refused even if no tensor would use it
        self.wrapping = wrapping_of(compressor_spec) or Wrapping()
        self.seed = seed
        self.rank = rank
        self.specs = specs
        self.numbers = range(len(specs)) if numbers is None else numbers
        chosen = [rule.choose(spec, compressor_spec) for spec in specs]
        made = {each: create(each) for each in set(chosen)}  # once: their state is kept apart from them
        self._chosen = self.compressors = [made[each] for each in chosen]
        elements = [spec.elements for spec in specs]
        self.ledger = Ledger(elements, velocity=self.wrapping.momentum > 0)
        self.ledger.states = self.first_states()
        self.adopt(plan or divide(elements))
        inner = map(without_feedback, self.compressors)
        self.planned = [place for place, compressor in enumerate(inner) if is_model_wide(compressor)]

    def adopt(self, plan: Plan) -> None:
        """Divide the model otherwise, between two steps. What the ledger holds is of tensors, and stays.

        So does what compressors remember. Of tensors that are merged, the first one's serves and goes on, and
        the others' waits until they are compressed by themselves again.
        """
        self.plan = plan
        self.unit_of = plan.unit_of()
        self.send_whole(frozenset())
        self.densities = self._densities(plan.norms)

    def send_whole(self, units: frozenset[int]) -> None:
        """From the next step on send these units of the plan as float32, with what is owed of them, and all
        others compressed. Not for those with momentum, a delay or a plan for the model."""
        self.compressors = [
            LOSSLESS if self.unit_of[place] in units else compressor
            for place, compressor in enumerate(self._chosen)
        ]
        self.feedback = [isinstance(compressor, ErrorFeedback) for compressor in self.compressors]
        self.checks = [checks(compressor) for compressor in self.compressors]
        self.runs = [
            runs_of(self.compressors, self.specs, unit.first, unit.last, merged=self.plan.merged)
            for unit in self.plan.units
        ]

    def _densities(self, norms: Sequence[float]) -> dict[int, float]:
        """Of the tensors whose norms have a say in how much of them is sent."""
        inner = map(without_feedback, self._chosen)
        choosing = {place: each for place, each in enumerate(inner) if is_choosing(each)}
        if not (norms and choosing):
            return {}
        # The rule has one sparsifier for all of them.
        found = next(iter(choosing.values())).densities([norms[place] for place in choosing])
        return {} if found is None else dict(zip(choosing, found, strict=True))

    def kept(self, epoch: float) -> list[int]:
        """By tensor, how many elements a step sends."""
        pairs = enumerate(zip(map(without_feedback, self.compressors), self.specs, strict=True))
        return [
            compressor.options.keep(spec.elements, epoch, self.densities.get(place))
            if isinstance(compressor, Sparse)
            else spec.elements
            for place, (compressor, spec) in pairs
        ]

    def first_states(self) -> list[Any]:
        """What the compressors remember before the first step."""
        pairs = zip(self.compressors, self.specs, strict=True)
        return [without_feedback(compressor).init(spec) for compressor, spec in pairs]

    def divide(self, slices: int) -> None:
        """From now on steps send one of so many slices. Momentum starts anew."""
        self.ledger.divide(slices)

    def begin(
        self,
        samples: int,
        *,
        version: int,
        step: int | None = None,
        epoch: float = 0.0,
        workers: int = 1,
        wanted: frozenset[int] | None = None,
        flush: bool = False,
    ) -> Step:
        """A step: mean gradients over `samples` samples (at least 1), that are to come one by one.

        version: of the parameters they are computed at. step: what a delay counts, the version if not given.
        epoch: passes over the training samples so far.
        workers: that take part in the round, at least 1.
        wanted: parts that are sent, all if None; what the ledger holds of the others stays as it is.
        flush: send everything that is owed too, also what the ledger holds of the others, as float32: the
            last push of a worker.
        """
        if samples < 1:
            raise ValueError(f"samples: expected at least 1, got {samples}")
        return Step(self, samples, version, version if step is None else step, epoch, workers, wanted, flush)

    def compress(self, gradients: Sequence[torch.Tensor | None], samples: int, **step: Any) -> list[Payload]:
        """All of a step at once, as `begin` takes it.

        A gradient that is None does not exist, see `Step.add`. One that lies on a GPU is compressed there if
        its compressor can, otherwise on the host.
        Returns payloads that lie end to end in flat order; none at all at a version that a delay passes over.

        Raises:
            NonFiniteGradient: nothing was changed; the next step goes on as if this one had not been.
            ValueError: gradients of other number, shape or type than the specs say.
        """
        return self._whole(self.begin(samples, **step), gradients)

    def flush(self, gradients: Sequence[torch.Tensor | None], *, workers: int = 1) -> list[Payload]:
        """These gradients and everything that is owed, as float32. Nothing is left afterwards."""
        return self._whole(self.begin(1, version=0, workers=workers, flush=True), gradients)

    def _whole(self, step: Step, gradients: Sequence[torch.Tensor | None]) -> list[Payload]:
        if len(gradients) != len(self.specs):
            raise ValueError(f"expected {len(self.specs)} gradients, got {len(gradients)}")
        sent: dict[int, list[Payload]] = {}
        for place in reversed(range(len(gradients))):
            sent.update(step.add(place, gradients[place]))
        step.commit()
        in_order = [part for unit in reversed(self.plan.units) for part in unit.parts]
        return [payload for part in in_order for payload in sent.get(part, ())]


def model_wide(compressor_spec: str) -> bool:
    """Whether the compressor divides what is sent among all tensors, and wants to know their FLOPs for it."""
    return is_model_wide(without_feedback(create(compressor_spec)))


def chooses_by_norm(compressor_spec: str) -> bool:
    """Whether how much of each tensor is sent follows from the norms of all parameters (`Plan.norms`)."""
    compressor = without_feedback(create(compressor_spec))
    return is_choosing(compressor) and compressor.densities([1.0]) is not None
