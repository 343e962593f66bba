"""Coding across workers: several workers compute the same samples, which shortens messages or tolerates
stragglers.

`plan`, `exchange`, `redundancy` and `speeds` serve coded mode; `straggler` serves gradient coding.
`fixed_point` holds the integer format of exchanged gradients.

Pure functions and numpy. The server and the workers call them with the same numbers and get the same plan.
"""

from .exchange import Exchange as Exchange
from .exchange import packet_elements as packet_elements
from .fixed_point import FIXED_POINT_LIMIT as FIXED_POINT_LIMIT
from .fixed_point import from_fixed_point as from_fixed_point
from .fixed_point import to_fixed_point as to_fixed_point
from .plan import MAX_BLOCKS as MAX_BLOCKS
from .plan import MAX_NODES as MAX_NODES
from .plan import NOBODY as NOBODY
from .plan import ExchangePlan as ExchangePlan
from .plan import PlannedPacket as PlannedPacket
from .plan import plan as plan
from .plan import planning_with as planning_with
from .plan import resent as resent
from .redundancy import AdaptiveRedundancy as AdaptiveRedundancy
from .redundancy import UncodedTimes as UncodedTimes
from .redundancy import fastest as fastest
from .redundancy import possible as possible
from .redundancy import step_seconds as step_seconds
from .redundancy import without_redundancy as without_redundancy
from .speeds import block_sizes as block_sizes
