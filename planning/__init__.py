"""Planners: which tensors travel together, and in which order. They are pure functions of measurements.

The server, workers, tests and commands call them with the same numbers and get the same plan. The names of
`job` and `predictions`, which need the compressors and so numpy, are imported at their first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .choices import Fusion as Fusion
from .choices import Merging as Merging
from .choices import Order as Order
from .choices import Replan as Replan
from .choices import parse_fusion as parse_fusion
from .choices import parse_order as parse_order
from .choices import parse_replan as parse_replan
from .links import fit as fit
from .models import tensors as tensors
from .norms import NORM_VERSIONS as NORM_VERSIONS
from .norms import is_measured as is_measured
from .plans import make_plan as make_plan
from .profile import Layer as Layer
from .profile import Link as Link
from .profile import joined as joined
from .profile import layers_of as layers_of

if TYPE_CHECKING:
    from .job import FRAMING as FRAMING
    from .job import Costs as Costs
    from .job import JobProfile as JobProfile
    from .job import StepOptions as StepOptions
    from .predictions import predict as predict

_LATE = {
    **dict.fromkeys(("FRAMING", "Costs", "JobProfile", "StepOptions"), ".job"),
    "predict": ".predictions",
}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATE[name], __name__), name)
