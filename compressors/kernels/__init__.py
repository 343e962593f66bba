"""The hot loops, chosen in one place: the rest of the room imports them from here.

`reference` and its like say in plain numpy what each kernel computes, `cpu`, `linear`, `selection` and
`sparse` compute it fast, `cuda` some of it on a GPU, and tests hold them equal bit for bit. `devices` takes
torch tensors and chooses between the two by where they lie.
"""

from __future__ import annotations

from collections.abc import Callable

from . import block_selection as block_selection
from . import cpu as cpu
from . import devices as devices
from . import linear as linear
from . import selection as selection
from . import sparse as sparse
from .notices import tell_of_compiling as tell_of_compiling
from .reference import FLOAT32_MAX as FLOAT32_MAX
from .reference import Magnitudes as Magnitudes
from .threads import set_threads as set_threads

# Each compiles a part of the kernels, or loads it from the cache.
WARM_UPS = (cpu.warm_up, linear.warm_up, selection.warm_up, block_selection.warm_up, sparse.warm_up)


def warm_up(stopped: Callable[[], bool] = lambda: False) -> None:
    """Compile every kernel, or load it from the cache, so that no later call has to wait for it.

    The first time on a machine takes half a minute of a processor.

    Args:
        stopped: whether to leave the rest to later calls.
    """
    for part in WARM_UPS:
        if stopped():
            return
        part()
