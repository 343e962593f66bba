"""Planners: what travels together, and in which order. Pure functions of what was measured.

Server, workers, tests and commands call them with the same numbers and get the same plan.
"""

from .choices import Fusion as Fusion
from .choices import Merging as Merging
from .choices import Order as Order
from .choices import Ordering as Ordering
from .choices import Replan as Replan
from .choices import parse_fusion as parse_fusion
from .choices import parse_order as parse_order
from .choices import parse_replan as parse_replan
from .choices import turns as turns
from .fusion import FusionGroup as FusionGroup
from .fusion import by_bytes as by_bytes
from .fusion import fastest as fastest
from .fusion import layer_by_layer as layer_by_layer
from .fusion import mg_wfbp as mg_wfbp
from .fusion import seamgs as seamgs
from .fusion import sent as sent
from .fusion import sparse_error as sparse_error
from .links import fit as fit
from .plans import make_plan as make_plan
from .profile import Layer as Layer
from .profile import Link as Link
from .profile import joined as joined
from .profile import layers_of as layers_of
from .profile import produced as produced
from .schedules import Message as Message
from .schedules import MessageTimeline as MessageTimeline
from .schedules import Schedule as Schedule
from .schedules import best as best
from .schedules import run as run
from .schedules import two_phase as two_phase
