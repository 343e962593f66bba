"""The curves of a job for TensorBoard: an event file of each server process in the folder of --tensorboard.

| tag | written |
|---|---|
| `loss/training` | for each version whose loss is known; in a long job the mean of several |
| `evaluation/NAME` | for each evaluation and metric |
| `job/…`, `bytes/…` | once in `EVERY_S`, while versions are made |

The step of all points is the version.
"""

from __future__ import annotations

import asyncio
import importlib
import math
from pathlib import Path
from typing import Any

from ..common.configuration import UsageError
from .job.core import Core
from .metrics import ServerMetrics

EVERY_S = 1.0


class Curves:
    """Writes the curves of one job. It belongs to the server's event loop; a thread of the package writes."""

    def __init__(self, folder: str, core: Core, metrics: ServerMetrics) -> None:
        """Raises UsageError if the package is not installed, or the folder cannot be written to."""
        try:
            package: Any = importlib.import_module("tensorboardX")
        except ImportError:
            remedy = "run pip install '.[tensorboard]' in a checkout of Gradwire"
            raise UsageError(
                f"--tensorboard {folder}: the package tensorboardX is not installed; {remedy}"
            ) from None
        try:
            self._writer: Any = package.SummaryWriter(str(Path(folder).absolute()))
        except OSError as error:
            raise UsageError(f"--tensorboard {folder}: {error.strerror}; name another folder") from None
        self._core, self._metrics = core, metrics
        # A server that continues a job has the points of the earlier one, whose files have them.
        self._loss_until = max((each.version for each in metrics.loss_history.messages()), default=0)
        self._evaluated_until = core.state.evaluations.newest
        self._version = core.state.version

    async def draw(self) -> None:
        """Write once in `EVERY_S`, for ever."""
        while True:
            await asyncio.sleep(EVERY_S)
            self.write()

    def write(self) -> None:
        """Write the points since the last call."""
        state, metrics = self._core.state, self._metrics
        for point in metrics.loss_history.messages():
            if point.version > self._loss_until:
                self._add("loss/training", point.loss, point.version)
                self._loss_until = point.version
        for each in state.evaluations.done:
            if each.epoch > self._evaluated_until:
                for name, value in each.metrics.items():
                    self._add(f"evaluation/{name}", value, each.version)
                self._evaluated_until = each.epoch
        if state.version == self._version:
            return
        self._version = state.version
        bytes_ = metrics.traffic()
        for name, value in {
            "job/epoch": state.epoch + state.epoch_progress,
            "job/members": len(state.roster.members),
            "job/step_seconds": metrics.step_seconds or math.nan,
            "job/learning_rate": self._core.learning_rate or math.nan,
            "bytes/up": bytes_.wire_bytes_up,
            "bytes/down": bytes_.wire_bytes_down,
            "bytes/ratio_up": bytes_.raw_bytes_up / (bytes_.wire_bytes_up or math.nan),
            "bytes/ratio_down": bytes_.raw_bytes_down / (bytes_.wire_bytes_down or math.nan),
        }.items():
            self._add(name, value, state.version)

    def close(self) -> None:
        """Write the last points, and close the file."""
        self.write()
        self._writer.close()

    def _add(self, tag: str, value: float, version: int) -> None:
        if math.isfinite(value):
            self._writer.add_scalar(tag, value, version)
