"""Checksums by which a server detects that a worker's replica differs from its own parameters."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .wire import crc32c

CHECK_EVERY = 64  # versions from one checksum to the next, because a checksum reads the whole model


def is_checked(version: int) -> bool:
    """Return True if server and workers compute checksums of their parameters at this version."""
    return version % CHECK_EVERY == 0


def next_check(version: int) -> int:
    """Return the first version after `version` at which server and workers compute checksums of their
    parameters.
    """
    return (version // CHECK_EVERY + 1) * CHECK_EVERY


def checksum(values: npt.NDArray[np.float32]) -> int:
    """Return the CRC-32C over a whole replica: all values, flat float32, in manifest order."""
    return crc32c((np.ascontiguousarray(values).view(np.uint8),))
