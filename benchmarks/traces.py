"""When a process computes: a line for every step, in a file of its own."""

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
    """A step's computation, by the monotonic clock: when the forward pass began, and when backward produced
    each gradient, in the order of the forward pass."""

    began: float
    produced: tuple[float, ...]

    @property
    def ended(self) -> float:
        return max(self.produced)

    @property
    def seconds(self) -> float:
        return self.ended - self.began


Trace = list[ComputedStep]


class Follower:
    """Writes the trace of a model whose loss reaches every parameter."""

    def __init__(self, network: nn.Module, folder: Path) -> None:
        self._path = folder / f"{os.getpid()}"
        self._began = 0.0
        self._produced: dict[int, float] = {}
        parameters = list(network.parameters())
        self._tensors = len(parameters)
        network.register_forward_pre_hook(self._begin)
        for place, parameter in enumerate(parameters):
            any_parameter: Any = parameter  # its method has no types
            any_parameter.register_hook(partial(self._came, place))

    def _begin(self, network: nn.Module, inputs: object) -> None:
        self._produced.clear()
        self._began = time.monotonic()

    def _came(self, place: int, gradient: object) -> None:
        self._produced[place] = time.monotonic()
        if len(self._produced) == self._tensors:
            with self._path.open("a") as lines:
                lines.write(
                    f"{self._began} {' '.join(str(at) for _, at in sorted(self._produced.items()))}\n"
                )


def read(folder: Path) -> list[Trace]:
    """Return the traces, one for each process."""
    found: list[Trace] = []
    for path in sorted(folder.iterdir()):
        lines = [list(map(float, line.split())) for line in path.read_text().splitlines()]
        found.append([ComputedStep(began, tuple(produced)) for began, *produced in lines])
    return found
