"""What the links of a star carry over time, and what the processes behind them take."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .star import Star

SAMPLE_S = 0.005
PROCESSES_S = 0.5


@dataclass(frozen=True, slots=True)
class Sample:
    """State of a network at a time. carried: by node, bytes received and sent so far."""

    at: float
    carried: Mapping[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """Usage of all processes until a time. peak_bytes: by node, its process's peak resident memory."""

    at: float
    cpu_seconds: float
    peak_bytes: Mapping[str, int]


class LinkRecorder:
    """Context that samples the bytes of a star's links, and the usage of the processes behind them."""

    def __init__(self, star: Star, nodes: Sequence[str]) -> None:
        self._star, self._nodes = star, nodes
        self.samples: list[Sample] = []
        self.taken: list[ProcessUsage] = []
        self._pids: dict[str, list[int]] = {}
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._repeat, args=(self._read_links, SAMPLE_S)),
            threading.Thread(target=self._repeat, args=(self._read_processes, PROCESSES_S)),
        ]

    def __enter__(self) -> LinkRecorder:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _repeat(self, read: Any, every_s: float) -> None:
        while not self._over.wait(every_s):
            read()

    def _read_links(self) -> None:
        carried = {node: self._star.carried(node) for node in self._nodes}
        self.samples.append(Sample(time.monotonic(), carried))

    def _read_processes(self) -> None:
        total, peaks = 0.0, dict.fromkeys(self._nodes, 0)
        for node in self._nodes:
            found = [memory_and_cpu(pid) for pid in self._pids.get(node, ())]
            if not found or None in found:  # to ask which there are takes longer than all the rest
                self._pids[node] = self._star.processes(node)
                found = [memory_and_cpu(pid) for pid in self._pids[node]]
            for taken in filter(None, found):
                peaks[node] = max(peaks[node], taken[0])
                total += taken[1]
        self.taken.append(ProcessUsage(time.monotonic(), total, peaks))

    def carried_between(self, node: str, begin: float, end: float) -> tuple[int, int]:
        """Return the bytes to and from a node in this time."""
        times = [sample.at for sample in self.samples]
        came, left = zip(*(sample.carried[node] for sample in self.samples), strict=True)
        into, out = (np.diff(np.interp((begin, end), times, counts)) for counts in (came, left))
        return round(into.item()), round(out.item())

    def peak_bytes(self, node: str, end: float) -> int:
        """Return the peak memory of the node's process until `end`."""
        return max((taken.peak_bytes[node] for taken in self.taken if taken.at <= end), default=0)

    def cpu_between(self, begin: float, end: float) -> float:
        """Return the CPU seconds of all processes in about this time."""
        spent = [taken.cpu_seconds for taken in self.taken if begin <= taken.at <= end]
        return spent[-1] - spent[0] if spent else 0.0


def memory_and_cpu(pid: int) -> tuple[int, float] | None:
    """Return a process's peak resident bytes and CPU seconds; None if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    peak = next((line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")), "0")
    ticks = int(stat[11]) + int(stat[12])
    return int(peak) * 1024, ticks / os.sysconf("SC_CLK_TCK")
