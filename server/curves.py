"""The curves of a job for TensorBoard: an event file of each server process in the folder of --tensorboard.

| tag | written |
|---|---|
| `loss/training` | for each version whose loss is known; in a long job the mean of several |
| `evaluation/NAME` | for each evaluation and metric |
| `job/…`, `bytes/…` | once in `EVERY_S`, while versions are made |

The step of all points is the version.

The package's own SummaryWriter would block its caller for ever once its thread has failed, as on a full disk.
Here a thread writes the points of a second, and the first failure ends the curves with a warning.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import math
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..common.configuration import UsageError
from .job.core import Core
from .metrics import ServerMetrics

EVERY_S = 1.0
Point = tuple[str, float, int]  # tag, value, version

log = logging.getLogger(__name__)


class Curves:
    """Writes the curves of one job. It belongs to the server's event loop."""

    def __init__(self, folder: str, core: Core, metrics: ServerMetrics) -> None:
        """Raises UsageError if the package is not installed, or the folder cannot be written to."""
        try:
            records: Any = importlib.import_module("tensorboardX.record_writer")
            self._event: Any = importlib.import_module("tensorboardX.proto.event_pb2").Event
            self._summary: Any = importlib.import_module("tensorboardX.summary").scalar
        except ImportError:
            remedy = "run pip install '.[tensorboard]' in a checkout of Gradwire"
            raise UsageError(
                f"--tensorboard {folder}: the package tensorboardX is not installed; {remedy}"
            ) from None
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}"
            self._writer: Any = records.RecordWriter(str(Path(folder).absolute() / name))
            self._append([self._event(wall_time=time.time(), file_version="brain.Event:2")])
        except OSError as error:
            raise UsageError(f"--tensorboard {folder}: {error.strerror}; name another folder") from None
        self._folder, self._core, self._metrics = folder, core, metrics
        # A server that continues a job has the points of the earlier one, whose files have them.
        self._loss_until = max((each.version for each in metrics.loss_history.messages()), default=0)
        self._evaluated_until = core.state.evaluations.newest
        self._version = core.state.version

    async def draw(self) -> None:
        """Write once in `EVERY_S`, until a write fails."""
        while self._writer is not None:
            await asyncio.sleep(EVERY_S)
            await self._write()

    async def close(self) -> None:
        """Write the last points, and close the file."""
        await self._write()
        if self._writer is not None:
            self._writer.close()

    async def _write(self) -> None:
        if self._writer is None:
            return
        now = time.time()
        events = [
            self._event(step=version, wall_time=now, summary=self._summary(tag, value))
            for tag, value, version in self._points()
        ]
        try:
            await asyncio.to_thread(self._append, events)
        except OSError as error:
            writer, self._writer = self._writer, None
            with contextlib.suppress(OSError):
                writer.close()
            text = "--tensorboard %s: %s; this server writes no more curves"
            log.warning(text, self._folder, error.strerror)

    def _append(self, events: Sequence[Any]) -> None:
        for event in events:
            self._writer.write(event.SerializeToString())
        self._writer.flush()

    def _points(self) -> list[Point]:
        """Return the points since the last call whose value is known."""
        state, metrics = self._core.state, self._metrics
        found: list[Point] = []
        for point in metrics.loss_history.messages():
            if point.version > self._loss_until:
                found.append(("loss/training", point.loss, point.version))
                self._loss_until = point.version
        for each in state.evaluations.done:
            if each.epoch > self._evaluated_until:
                for name, value in each.metrics.items():
                    found.append((f"evaluation/{name}", value, each.version))
                self._evaluated_until = each.epoch
        if state.version != self._version:
            self._version = state.version
            found += [(name, value, state.version) for name, value in self._of_job().items()]
        return [each for each in found if math.isfinite(each[1])]

    def _of_job(self) -> dict[str, float]:
        """Return the present numbers of the job; NaN for one that is unknown."""
        state, metrics = self._core.state, self._metrics
        bytes_ = metrics.traffic()
        return {
            "job/epoch": state.epoch + state.epoch_progress,
            "job/members": len(state.roster.members),
            "job/step_seconds": metrics.step_seconds or math.nan,
            "job/learning_rate": self._core.learning_rate or math.nan,
            "bytes/up": bytes_.wire_bytes_up,
            "bytes/down": bytes_.wire_bytes_down,
            "bytes/ratio_up": bytes_.raw_bytes_up / (bytes_.wire_bytes_up or math.nan),
            "bytes/ratio_down": bytes_.raw_bytes_down / (bytes_.wire_bytes_down or math.nan),
        }
