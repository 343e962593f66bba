"""The compressor that suits a torch optimizer."""

from __future__ import annotations

import logging

import torch

from ..compressors import CompressorSpec, advice, suited
from ..optim.steps import Adam, Sgd

_log = logging.getLogger("gradwire.ddp.hook")


def suited_to(optimizer: torch.optim.Optimizer, compressor: CompressorSpec) -> CompressorSpec:
    """Return the compressor, adapted to the optimizer. Log the adaptation, and warn of lost accuracy."""
    if "eps" in optimizer.defaults:  # it divides by the root of squared gradients
        options: Adam | Sgd = Adam()
    else:
        options = Sgd(momentum=0.9 if optimizer.defaults.get("momentum") else 0.0)
    chosen = suited(compressor, options, local=False)
    if chosen != compressor:
        _log.info(
            "using compressor %s, because the optimizer divides by the root of squared gradients", chosen
        )
    for line in advice(chosen, options, local=False, server=False):
        _log.warning("%s", line)
    return chosen
