"""The computation of `layers` by itself, without exchange and optimizer.

    python -m gradwire.benchmarks.computing MODEL SECONDS REAL TRACE STEPS

SECONDS, REAL and TRACE are those of `layers.task`.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch

from .layers import task


def main(arguments: list[str]) -> int:
    model, seconds, real, trace, steps = arguments
    torch.set_num_threads(1)
    work = task(model, float(seconds), int(real), trace=trace)
    network, samples = work.model(), work.batch(np.arange(int(real) or 1))
    for _ in range(int(steps)):
        network.zero_grad()
        found: Any = work.loss(network, samples)
        found.backward()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
