"""The fixed inputs of a step: a model's tensors, their compressors, and the plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..common.parts import Plan, divide
from .base import Compressor, TensorSpec, is_fused
from .bases import Bases
from .dense import Dense
from .feedback import ErrorFeedback, without_feedback
from .joining.runs import checks_alone, runs_of
from .layers import LayerRule
from .ledger import Ledger
from .payload import DenseFormat
from .registry import CompressorSpec, parse_compressor
from .sparsifiers import SparseOptions
from .spikes import keeps_spikes
from .wrapping import Wrapping

LOSSLESS, LOSSLESS_SPEC = Dense(format=DenseFormat.FLOAT32), parse_compressor("none")


class ModelTensors:
    """The tensors of a model: their specs, their compressors, and how a plan divides them.

    A list with an entry for each tensor is in manifest order.

    Attributes:
        chosen: compressor of each tensor, as declared.
        compressors: compressor of each tensor, as built; tensors with equal specs share one object.
        wrapping: options that every lossy compressor has, as the job's compressor sets them.
        ledger: residuals, and states of the compressors.
        unit_of: number of the unit of each tensor.
        runs: for each unit, its runs of neighbouring tensors that one call may serve.
        densities: by index of the tensor, the fraction of its elements that is sent, where norms decide it.
        feedback: True for each tensor whose compressor has error feedback.
        keeps_spikes: True for each tensor whose residual would keep a spike.
        checks: True for each tensor whose compression finds a gradient that is not finite.
        on_gpu: True for each tensor that can be compressed on a GPU.
        drawn: True for each tensor of which all workers send the same elements, drawn from a seed.
        bases: the job's bases at the version of the next step. Their owner replaces them with each version.
        planned: indices of the tensors whose compressor divides a budget for the whole model.
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
        """Args:
            compressor: compressor of the tensors that the rule selects, `name[:key=value,...]` or parsed.
            seed: seed of the job, at least 0. Seed and rank determine every step's random numbers.
            rank: rank of this worker, at least 0; it may be changed between steps. No two workers of a round
                may have the same.
            numbers: number of each tensor in the key of its random numbers, distinct; None for its index.

        Raises:
            SpecError: the compressor does not exist, or has bad options.
        """
        given = parse_compressor(compressor)
        self.wrapping = given.wrapping or Wrapping()
        self.seed = seed
        self.rank = rank
        self.specs = specs
        self.numbers = range(len(specs)) if numbers is None else numbers
        self.chosen = [rule.choose(spec, given) for spec in specs]
        made = {each: each.build() for each in set(self.chosen)}  # shareable: their state is in the ledger
        self.compressors: list[Compressor] = [made[each] for each in self.chosen]
        self.bases = Bases.start(specs, self.chosen, self.compressors, seed, self.numbers)
        self._given = [*zip(self.chosen, self.compressors, strict=True)]
        elements = [spec.elements for spec in specs]
        self.ledger = Ledger(elements, velocity=self.wrapping.momentum > 0)
        self.ledger.states = self.first_states()
        self.adopt(plan or divide(elements, uncut=frozenset(self.bases.values)))
        self.planned = [index for index, each in enumerate(self.chosen) if each.entry.model_wide]

    def adopt(self, plan: Plan) -> None:
        """Divide the model by another plan, between two steps.

        Residuals and states belong to tensors, and stay. Merged tensors use the state of the first one; the
        states of the others stay unchanged until each is compressed by itself again.
        """
        self.plan = plan
        self.unit_of = plan.unit_of()
        self.send_whole(frozenset())
        self.densities = self._densities(plan.norms)

    def send_whole(self, units: frozenset[int]) -> None:
        """Send these units of the plan as float32 from the next step on, with their residual, and compress
        all others.

        It must not be used with momentum, a delay or a budget for the whole model. units: numbers of the
        units.
        """
        pairs = [
            (LOSSLESS_SPEC, LOSSLESS) if unit in units else given
            for unit, given in zip(self.unit_of, self._given, strict=True)
        ]
        self.chosen, self.compressors = [each for each, _ in pairs], [made for _, made in pairs]
        self.feedback = [isinstance(compressor, ErrorFeedback) for compressor in self.compressors]
        self.keeps_spikes = [*map(keeps_spikes, self.compressors)]
        self.checks = [each.joins is not None or checks_alone(made) for each, made in pairs]
        # Without a fused pass, payloads are subtracted from the residual on the host.
        self.on_gpu = [
            each.entry.on_gpu and (not isinstance(made, ErrorFeedback) or is_fused(made.compressor))
            for each, made in pairs
        ]
        self.drawn = [bool(getattr(without_feedback(made), "seeded", False)) for made in self.compressors]
        self.runs = [
            runs_of(self.chosen, self.specs, unit.first, unit.last, merged=self.plan.merged)
            for unit in self.plan.units
        ]

    def _densities(self, norms: Sequence[float]) -> dict[int, float]:
        """Return the fraction of elements to send where norms decide it, by index of the tensor."""
        by_norm = [index for index, (each, _) in enumerate(self._given) if each.chooses_by_norm]
        if not (norms and by_norm):
            return {}
        # The layer rule uses one sparsifier for all of them.
        found = self._given[by_norm[0]][0].options.densities([norms[index] for index in by_norm])
        return dict(zip(by_norm, found, strict=True))

    def sent_shares(self, epoch: float) -> list[float]:
        """Return the fraction of elements that a step at `epoch` sends of each tensor, before sparsifiers
        round to whole elements."""
        return [
            1 / each.options.ratio_at(epoch, self.densities.get(index))
            if isinstance(each.options, SparseOptions)
            else 1.0
            for index, each in enumerate(self.chosen)
        ]

    def first_states(self) -> list[Any]:
        pairs = zip(self.compressors, self.specs, strict=True)
        return [without_feedback(compressor).init(spec) for compressor, spec in pairs]

    def set_slices(self, slices: int) -> None:
        """Prepare for steps that send one of `slices` slices of the parts (`Ledger.set_slices`)."""
        self.ledger.set_slices(slices)
