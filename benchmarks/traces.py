"""Traces of a process's computation: times of every step, a line each, in a file for each process."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """The times of one step's computation, by the monotonic clock.

    Attributes:
        began: start of the forward pass.
        produced: time at which backward has produced each gradient, in the order of the forward pass.
    """

    began: float
    produced: tuple[float, ...]

    @property
    def ended(self) -> float:
        """Time of the last gradient, by the monotonic clock."""
        return max(self.produced)

    @property
    def seconds(self) -> float:
        """Seconds from the start of the forward pass to the last gradient."""
        return self.ended - self.began


Trace = list[ComputedStep]


class TraceWriter:
    """Hooks of a network that write a line with the times of each step to the process's trace file.

    Every parameter must get a gradient in every step.
    """

    def __init__(self, network: nn.Module, folder: Path) -> None:
        """Register the hooks.

        Args:
            network: the model.
            folder: folder for the trace, in a file named after the process id.
        """
        self._path = folder / f"{os.getpid()}"
        self._began = 0.0
        self._produced: dict[int, float] = {}
        parameters = list(network.parameters())
        self._tensors = len(parameters)
        network.register_forward_pre_hook(self._begin)
        for index, parameter in enumerate(parameters):
            any_parameter: Any = parameter  # register_hook is not annotated
            any_parameter.register_hook(partial(self._record, index))

    def _begin(self, network: nn.Module, inputs: object) -> None:
        """Called at the start of a forward pass."""
        self._produced.clear()
        self._began = time.monotonic()

    def _record(self, index: int, gradient: object) -> None:
        """Called with each gradient; writes the step's line after the last one."""
        self._produced[index] = time.monotonic()
        if len(self._produced) == self._tensors:
            with self._path.open("a", encoding="utf-8") as lines:
                lines.write(
                    f"{self._began} {' '.join(str(at) for _, at in sorted(self._produced.items()))}\n"
                )


def read(folder: Path) -> list[Trace]:
    """Read all trace files in a folder and return the traces, one for each process."""
    found: list[Trace] = []
    for path in sorted(folder.iterdir()):
        lines = [list(map(float, line.split())) for line in path.read_text(encoding="utf-8").splitlines()]
        found.append([ComputedStep(began, tuple(produced)) for began, *produced in lines])
    return found
