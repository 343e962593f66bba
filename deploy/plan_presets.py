"""gc-plan --presets: predicted times of the presets for a job, beside losses that were measured with them.

The losses are in preset_results.json, a list of objects with the fields of `Measured`. People copy them from
tables of gc-bench, and an object is there only if its job has really run. A loss holds for its kind of model,
data and length.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from ..common.presets import PRESETS
from ..compressors import AUTO, compressor_of, parse_compressor
from ..planning.job import JobProfile, StepOptions
from ..planning.predictions import Prediction, predict, predictable

RESULTS = Path(__file__).with_name("preset_results.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The loss of a job with a preset, or with settings as near to one as `conditions` says.

    Attributes:
        preset: name of the preset.
        model: kind of model, such as transformer.
        parameters: number of the model's parameters.
        task: data that it learned.
        workers: number of workers.
        steps: number of steps of each worker.
        loss_percent: difference of the validation loss to `against`, in percent of that loss; below 0 is
            better.
        against: training that the loss is compared with.
        up, down: factor by which fewer bytes than float32 in every step were sent in each direction.
        seeds: number of seeds behind the mean.
        conditions: settings in which the job differed from the preset; empty for none.
        source: command or page that the numbers are from.
    """

    preset: str
    model: str
    parameters: int
    task: str
    workers: int
    steps: int
    loss_percent: float
    against: str
    up: float
    down: float
    seeds: int
    conditions: str
    source: str

    def __str__(self) -> str:
        conditions = f"; {self.conditions}" if self.conditions else ""
        return (
            f"{self.preset}: loss {self.loss_percent:+.1f} % against {self.against}; {self.up:g} and "
            f"{self.down:g} times fewer bytes up and down; {self.model} of {self.parameters:,} parameters, "
            f"{self.task}, {self.workers} workers, {self.steps} steps, seeds: {self.seeds}{conditions} "
            f"({self.source})"
        )


def measured() -> list[Measured]:
    """Return all measured losses."""
    return [Measured(**each) for each in json.loads(RESULTS.read_text(encoding="utf-8"))]


def ranked_presets(profile: JobProfile) -> dict[str, Prediction]:
    """Return the predicted step of each preset by its name, the fastest first.

    A round of H local steps counts as H steps.
    """
    found = {name: predict(profile, _choice(name)) for name in PRESETS}
    return dict(sorted(found.items(), key=lambda item: item[1].step_s))


def _choice(name: str) -> StepOptions:
    """Return a preset in the planner's terms."""
    sets = PRESETS[name].sets
    compressor, downlink = (str(sets[option]) for option in ("compressor", "downlink"))
    costs = compressor_of(compressor)[0].compression()
    if downlink != AUTO:
        costs = replace(costs, updates=parse_compressor(downlink).compression().up)
    return StepOptions(compressor=costs, mode=predictable(str(sets["mode"])))
