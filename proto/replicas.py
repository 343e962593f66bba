"""Checksums by which a server notices that a worker's replica has drifted."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .wire import crc32c

CHECK_EVERY = 64  # versions: a checksum reads the whole model


def is_checked(version: int) -> bool:
    """Return whether server and workers take checksums of their parameters at a version."""
    return version % CHECK_EVERY == 0


def next_check(version: int) -> int:
    """Return the first version after this one at which they do."""
    return (version // CHECK_EVERY + 1) * CHECK_EVERY


def checksum(values: npt.NDArray[np.float32]) -> int:
    """CRC-32C over a whole replica, flat float32, in the order of the manifest."""
    return crc32c((np.ascontiguousarray(values).view(np.uint8),))
