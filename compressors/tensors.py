"""What a step goes by and does not change: a model's tensors, their compressors, and the plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..planning.parts import Plan, divide
from .base import Compressor, TensorSpec, is_fused
from .dense import Dense
from .feedback import ErrorFeedback, without_feedback
from .layers import LayerRule
from .ledger import Ledger
from .payload import DenseFormat
from .registry import CompressorSpec, parse_compressor
from .runs import checks_alone, runs_of
from .sparsifiers import SparseOptions
from .spikes import keeps_spikes
from .wrapping import Wrapping

LOSSLESS, LOSSLESS_SPEC = Dense(format=DenseFormat.FLOAT32), parse_compressor("none")


class ModelTensors:
    """The tensors of a model, by index: their specs, their compressors, and how a plan divides them.

    Attributes:
        specs: of the tensors.
        chosen, compressors: by tensor, its compressor, as declared and as built; equal ones are one object.
        wrapping: what goes around the compressor that the rule gives the large tensors.
        numbers: by tensor, what goes into its random numbers.
        ledger: what is owed, and what compressors remember.
        plan: how the model is divided.
        unit_of: by tensor, its unit.
        runs: by unit, neighbouring tensors that one call may serve.
        densities: share of its elements that is sent, of tensors for which norms decide it.
        feedback, keeps_spikes, checks, on_gpu: by tensor, whether it has a residual; whether a spike would
            stay in that; whether compressing finds a gradient that is not finite; whether it takes one that
            lies on a GPU.
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
        self.chosen = [rule.choose(spec, given) for spec in specs]
        made = {each: each.build() for each in set(self.chosen)}  # once: their state is kept apart from them
        self.compressors: list[Compressor] = [made[each] for each in self.chosen]
        self._given = [*zip(self.chosen, self.compressors, strict=True)]
        elements = [spec.elements for spec in specs]
        self.ledger = Ledger(elements, velocity=self.wrapping.momentum > 0)
        self.ledger.states = self.first_states()
        self.adopt(plan or divide(elements))
        self.planned = [place for place, each in enumerate(self.chosen) if each.entry.model_wide]

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
        pairs = [
            (LOSSLESS_SPEC, LOSSLESS) if unit in units else given
            for unit, given in zip(self.unit_of, self._given, strict=True)
        ]
        self.chosen, self.compressors = [each for each, _ in pairs], [made for _, made in pairs]
        self.feedback = [isinstance(compressor, ErrorFeedback) for compressor in self.compressors]
        self.keeps_spikes = [*map(keeps_spikes, self.compressors)]
        self.checks = [each.joins is not None or checks_alone(made) for each, made in pairs]
        # What is not fused is subtracted from the residual on the host.
        self.on_gpu = [
            each.entry.on_gpu and (not isinstance(made, ErrorFeedback) or is_fused(made.compressor))
            for each, made in pairs
        ]
        self.runs = [
            runs_of(self.chosen, self.specs, unit.first, unit.last, merged=self.plan.merged)
            for unit in self.plan.units
        ]

    def _densities(self, norms: Sequence[float]) -> dict[int, float]:
        """By tensor, if its norm decides how much of it is sent."""
        by_norm = [place for place, (each, _) in enumerate(self._given) if each.chooses_by_norm]
        if not (norms and by_norm):
            return {}
        # The rule has one sparsifier for all of them.
        found = self._given[by_norm[0]][0].options.densities([norms[place] for place in by_norm])
        return dict(zip(by_norm, found, strict=True))

    def sent_shares(self, epoch: float) -> list[float]:
        """Return the share of its elements that a step sends of each tensor, above 0, up to 1.

        Sparsifiers round down to whole elements and keep at least one; shares are those before that.
        """
        return [
            1 / each.options.ratio_at(epoch, self.densities.get(place))
            if isinstance(each.options, SparseOptions)
            else 1.0
            for place, each in enumerate(self.chosen)
        ]

    def first_states(self) -> list[Any]:
        """What the compressors remember before the first step."""
        pairs = zip(self.compressors, self.specs, strict=True)
        return [without_feedback(compressor).init(spec) for compressor, spec in pairs]

    def set_slices(self, slices: int) -> None:
        """From now on steps send one of so many slices. Momentum starts anew."""
        self.ledger.set_slices(slices)
