"""The versions whose gradients are measured: the server takes their norms, by which SEAMGS decides (Q2 in
`fusion`).

Workers and server apply one rule to the version at which a gradient is computed, so that no message has to
name these versions. A worker whose indices are drawn (`randk`) then sends its gradient without the residual.
"""

from __future__ import annotations

NORM_VERSIONS = 8  # Number of measured versions over which norms are averaged.
# From one window of measured versions to the next. A prime number, so that a compressor's delay, which sends
# at every N-th version only, cannot miss all windows.
PERIOD = 53


def is_measured(version: int, delay: int = 1) -> bool:
    """Return True if gradients that are computed at `version` are measured.

    These are versions 0 to 7, then 52 to 60, 105 to 113 and so on. The windows begin one version before a
    multiple of `PERIOD`, which is where delays of 53 or 106 versions send. With such a delay a residual would
    never leave, so every second push is sent with it. The server measures these too, residuals included.
    """
    if delay % PERIOD == 0 and (version + 1) // delay % 2:
        return False
    return (version + 1) % PERIOD <= NORM_VERSIONS
