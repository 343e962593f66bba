"""gc-plan --presets: predicted times of the presets for a job. docs/how-to/slow-link.md has losses that were
measured with them.
"""

from __future__ import annotations

from dataclasses import replace

from ..common.presets import PRESETS
from ..compressors import AUTO, compressor_of, parse_compressor
from ..planning.job import JobProfile, StepOptions
from ..planning.predictions import Prediction, predict, predictable


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
