"""Losses that compressors were measured to cost with the job's optimizer, as gc-plan shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..compressors import CompressorSpec, parse_compressor, suited
from ..compressors.advice import LOSES
from ..optim.steps import OptimizerOptions
from ..planning.ddp import HOOKS
from ..planning.predictions import Prediction

COMPRESSORS = ("none", "bf16", "8bit", "4bit", "topk:ratio=100", "lowrank")
LEAST_ACCURACY = -0.01  # difference in accuracy; seeds differ by as much
FP32, _, POWER_SGD = HOOKS  # the fp16 hook of torch was not measured
NOT_MEASURED = "not measured"


@dataclass(frozen=True, slots=True)
class Losses:
    """Measured losses with one kind of optimizer, by name of the compressor or of torch's hook.

    Attributes:
        with_adam: True for the loss of a small GPT as a multiple of the uncompressed one, where the optimizer
            is Adam or alike; False for the difference from the uncompressed accuracy on digits, with SGD.
        measured: the values; a name that is missing or None was not measured.
    """

    with_adam: bool
    measured: Mapping[str, float | None]

    def text(self, each: Prediction) -> str:
        """Return the loss of a way as text; it was measured in synchronous modes."""
        loss = self.measured.get(each.choice.compressor.name) if each.synchronous else None
        if loss is None:
            return NOT_MEASURED
        return f"loss {100 * (loss - 1):+.3g} %" if self.with_adam else f"accuracy {loss:+.3f}"

    def little(self, each: Prediction) -> bool:
        """Return True if the compressor was measured with this optimizer and lost little."""
        loss = self.measured.get(each.choice.compressor.name)
        return loss is not None and (loss <= LOSES if self.with_adam else loss >= LEAST_ACCURACY)


def losses_with(optimizer: OptimizerOptions, compressors: Sequence[CompressorSpec]) -> Losses:
    """Return the losses of compressors, and of torch's hooks, with an optimizer."""
    adam = optimizer.undoes_weights
    found = {each.text: each.adam_loss if adam else each.sgd_accuracy for each in compressors}
    hooks = {FP32: 1.0, POWER_SGD: 1.08} if adam else {FP32: 0.0}  # records/2026-11-lowrank.md
    return Losses(adam, found | hooks)


def compared_specs(specs: Sequence[str] | None, optimizer: OptimizerOptions) -> list[CompressorSpec]:
    """Return the compressors to compare, as a job with this optimizer runs them.

    specs: those that the user has named; None for the usual ones.

    Raises:
        SpecError: a compressor is unknown.
    """
    return [suited(parse_compressor(spec), optimizer, local=False) for spec in specs or COMPRESSORS]
