"""Coding across workers: who computes what more than once, and what that saves in what they send.

Pure functions and numpy: both sides of the wire call them with the same numbers and get the same plan.
"""

from .exchange import Exchange, packet_elements
from .fixed_point import FIXED_POINT_LIMIT, from_fixed_point, to_fixed_point
from .plan import (
    MAX_BLOCKS,
    MAX_NODES,
    NOBODY,
    Packet,
    Plan,
    plan,
    planning_with,
    resent,
)
from .redundancy import Choice, StepTimes, fastest, possible, step_seconds, without_redundancy
from .straggler import StragglerCode, parts_of, straggler_code

__all__ = [
    "FIXED_POINT_LIMIT",
    "MAX_BLOCKS",
    "MAX_NODES",
    "NOBODY",
    "Choice",
    "Exchange",
    "Packet",
    "Plan",
    "StepTimes",
    "StragglerCode",
    "fastest",
    "from_fixed_point",
    "packet_elements",
    "parts_of",
    "plan",
    "planning_with",
    "possible",
    "resent",
    "step_seconds",
    "straggler_code",
    "to_fixed_point",
    "without_redundancy",
]
