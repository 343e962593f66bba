"""Planners: which tensors travel together, and in which order. They are pure functions of measurements.

The server, workers, tests and commands call them with the same numbers and get the same plan.
"""

from .choices import Fusion as Fusion
from .choices import Merging as Merging
from .choices import Order as Order
from .choices import Replan as Replan
from .choices import parse_fusion as parse_fusion
from .choices import parse_order as parse_order
from .choices import parse_replan as parse_replan
from .job import FRAMING as FRAMING
from .job import Costs as Costs
from .job import JobProfile as JobProfile
from .job import StepOptions as StepOptions
from .links import fit as fit
from .models import tensors as tensors
from .norms import NORM_VERSIONS as NORM_VERSIONS
from .norms import is_measured as is_measured
from .plans import make_plan as make_plan
from .predictions import predict as predict
from .profile import Layer as Layer
from .profile import Link as Link
from .profile import joined as joined
from .profile import layers_of as layers_of
