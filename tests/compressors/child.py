"""Runs a kernel in a forked process. A program of its own: a fork of the tests'
process could inherit a lock that its threads hold."""

from __future__ import annotations

import multiprocessing
import threading

import numpy as np
import numpy.typing as npt

from gradwire.compressors.kernels import cpu
from gradwire.compressors.kernels.shared import CHUNK, Magnitudes


def magnitudes(values: npt.NDArray[np.float32]) -> tuple[Magnitudes, bool]:
    """The result, and whether the child had help of its own."""
    found = cpu.magnitudes(values)
    return found, any(thread.name.startswith("gradwire-kernel") for thread in threading.enumerate())


if __name__ == "__main__":
    values = np.random.default_rng(1).standard_normal(2 * CHUNK, np.float32)
    expected = cpu.magnitudes(values)  # makes the pool, which a forked child inherits without threads
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply_async(magnitudes, (values,)).get(timeout=60) == (expected, True)
