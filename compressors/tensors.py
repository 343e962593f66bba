"""What a step goes by and does not change: a model's tensors, their compressors, and the plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..planning.parts import Plan, divide
from .base import TensorSpec, is_choosing, is_model_wide
from .dense import Dense
from .feedback import ErrorFeedback, without_feedback
from .layers import LayerRule
from .ledger import Ledger
from .payload import DenseFormat
from .registry import CompressorSpec, parse_compressor
from .runs import checks, runs_of
from .sparse import Sparse
from .spikes import keeps_spikes
from .wrapping import Wrapping

LOSSLESS = Dense(format=DenseFormat.FLOAT32)


class ModelTensors:
    """The tensors of a model, by index: their specs, their compressors, and how a plan divides them.

    Attributes:
        specs: of the tensors.
        compressors: of the tensors; equal ones are one object.
        wrapping: what goes around the compressor that the rule gives the large tensors.
        numbers: by tensor, what goes into its random numbers.
        ledger: what is owed, and what compressors remember.
        plan: how the model is divided.
        unit_of: by tensor, its unit.
        runs: by unit, neighbouring tensors that one call may serve.
        densities: share of its elements that is sent, of tensors for which norms decide it.
        feedback, keeps_spikes, checks: by tensor, whether it has a residual; whether a spike would stay in
            that; whether compressing finds a gradient that is not finite.
        planned: tensors whose compressor plans for the whole model.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        compressor: str | CompressorSpec,
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
            compressor: of the tensors that the rule compresses; `name[:key=value,...]`, or that parsed.
            rule: which tensors it applies to.
            seed: of the job, at least 0. It goes into every step's random numbers, and so does the rank.
            rank: of this worker, at least 0; it may be changed between steps. No two workers of a round may
                have the same.
            plan: how the model is divided; the default one if None.
            numbers: by tensor, what goes into its random numbers: at least 0, each once; its place if None.

        Raises:
            SpecError: there is no such compressor.
        """
        given = parse_compressor(compressor)
        self.wrapping = given.wrapping or Wrapping()
        self.seed = seed
        self.rank = rank
        self.specs = specs
        self.numbers = range(len(specs)) if numbers is None else numbers
        chosen = [rule.choose(spec, given) for spec in specs]
        made = {each: each.build() for each in set(chosen)}  # once: their state is kept apart from them
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
        self.keeps_spikes = [*map(keeps_spikes, self.compressors)]
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

    def sent_shares(self, epoch: float) -> list[float]:
        """Return the share of its elements that a step sends of each tensor, above 0, up to 1.

        Sparsifiers round down to whole elements and keep at least one; shares are those before that.
        """
        return [
            1 / compressor.options.ratio_at(epoch, self.densities.get(place))
            if isinstance(compressor, Sparse)
            else 1.0
            for place, compressor in enumerate(map(without_feedback, self.compressors))
        ]

    def first_states(self) -> list[Any]:
        """What the compressors remember before the first step."""
        pairs = zip(self.compressors, self.specs, strict=True)
        return [without_feedback(compressor).init(spec) for compressor, spec in pairs]

    def divide(self, slices: int) -> None:
        """From now on steps send one of so many slices. Momentum starts anew."""
        self.ledger.divide(slices)
