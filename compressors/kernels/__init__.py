"""The hot loops of the compressors. The rest of `compressors` imports them from here.

`cpu`, `linear`, `low_rank`, `selection`, `block_selection` and `sparse` check arrays and call the compiled
loops in `codes`, `dense` and `*_loops`. Of these `cuda` has some for a GPU. `devices` takes torch tensors,
and calls `cuda` or the others. Tests hold each to plain numpy, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

from . import block_selection as block_selection
from . import cpu as cpu
from . import devices as devices
from . import linear as linear
from . import low_rank as low_rank
from . import selection as selection
from . import sparse as sparse
from .notices import tell_of_compiling as tell_of_compiling
from .shared import FLOAT32_MAX as FLOAT32_MAX
from .shared import Magnitudes as Magnitudes
from .threads import limit_threads as limit_threads
from .threads import set_threads as set_threads

# Each function compiles the kernels of its module, or loads them from the cache.
WARM_UPS = (
    cpu.warm_up,
    linear.warm_up,
    low_rank.warm_up,
    selection.warm_up,
    block_selection.warm_up,
    sparse.warm_up,
)


def warm_up(stopped: Callable[[], bool] = lambda: False) -> None:
    """Compile every kernel, or load it from the cache on disk, so that no later call waits for a compilation.

    The first time on a machine takes half a minute of one core.

    Args:
        stopped: called before each group of kernels; when it returns True, the remaining kernels are left to
            the calls that need them.
    """
    for part in WARM_UPS:
        if stopped():
            return
        part()
