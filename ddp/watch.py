"""Warnings for a script that uses the hook in a way that would train something else."""

from __future__ import annotations

import logging
from typing import Any

import torch

_log = logging.getLogger("gradwire.ddp.hook")


class Watch:
    """Compares exchanges of gradients with the steps of the optimizer, if it is known. Each warning comes
    once."""

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self._called = False  # True once DDP has handed over a bucket
        self._exchanges = 0  # since the optimizer's last step
        self._warned: set[str] = set()
        # Accelerate's wrapper has no hooks of its own.
        inner: Any = getattr(optimizer, "optimizer", optimizer)
        self._watches = isinstance(inner, torch.optim.Optimizer)
        if self._watches:
            inner.register_step_post_hook(self._after_step)  # a closure of `step` may run backward

    def begin(self) -> None:
        """Note that an exchange begins; warn if no step has followed the one before."""
        self._called = True
        if self._watches and self._exchanges:
            self._warn(
                "discarded",
                "gradients were exchanged twice without optimizer.step(). If the script discards the "
                "first, as a GAN's discriminator does with those of the generator's loss, their unsent "
                "rest stays in the residual and is applied later: compute them under `with "
                "model.no_sync()`. To accumulate gradients, put all backward passes but the last under "
                "no_sync(), too",
            )

    def exchanged(self) -> None:
        """Note that the ranks have exchanged gradients, which a step should follow."""
        self._exchanges += 1

    def _after_step(self, *_: object) -> None:
        """Warn if DDP has never called the hook, after a step of the optimizer."""
        if not self._called:
            self._warn(
                "unused",
                "optimizer.step() without an exchange: DDP has not called gradwire.ddp.hook, so gradients "
                "are averaged uncompressed or not at all. Call model.register_comm_hook(state, "
                "gradwire.ddp.hook) on the DistributedDataParallel model itself. Lightning "
                "(ddp_comm_hook=) and Accelerate (comm_hook=) register a hook on GPUs alone",
            )
        self._exchanges = 0

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            _log.warning(text)
