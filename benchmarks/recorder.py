"""A recorder of the bytes on a star's links over time, and of the resources that its processes use."""

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

SAMPLE_S = 0.005  # between two samples of the links
PROCESSES_S = 0.5  # between two samples of the processes


@dataclass(frozen=True, slots=True)
class Sample:
    """The state of a network at one time.

    Attributes:
        at: time by the monotonic clock.
        carried: bytes that each node has received and sent so far, by node.
    """

    at: float
    carried: Mapping[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """The usage of all processes of a network up to one time.

    Attributes:
        at: time by the monotonic clock.
        cpu_seconds: CPU seconds of all processes together.
        peak_bytes: peak resident memory of each node's process, by node.
    """

    at: float
    cpu_seconds: float
    peak_bytes: Mapping[str, int]


class LinkRecorder:
    """A context in which threads sample a star's links, and the usage of the processes behind them.

    Attributes:
        samples: bytes on the links, by time.
        usages: usage of the processes, by time.
    """

    def __init__(self, star: Star, nodes: Sequence[str]) -> None:
        """Args:
        star: the network.
        nodes: nodes to sample.
        """
        self._star, self._nodes = star, nodes
        self.samples: list[Sample] = []
        self.usages: list[ProcessUsage] = []
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
            if not found or None in found:  # list processes only after a change, because that takes long
                self._pids[node] = self._star.processes(node)
                found = [memory_and_cpu(pid) for pid in self._pids[node]]
            for taken in filter(None, found):
                peaks[node] = max(peaks[node], taken[0])
                total += taken[1]
        self.usages.append(ProcessUsage(time.monotonic(), total, peaks))

    def carried_between(self, node: str, begin: float, end: float) -> tuple[int, int]:
        """Return the bytes that a node has received and sent between two times of the monotonic clock."""
        times = [sample.at for sample in self.samples]
        received, sent = zip(*(sample.carried[node] for sample in self.samples), strict=True)
        into, out = (np.diff(np.interp((begin, end), times, counts)) for counts in (received, sent))
        return round(into.item()), round(out.item())

    def peak_bytes(self, node: str, end: float) -> int:
        """Return the peak resident bytes of a node's process up to time `end`; 0 if it was never sampled."""
        return max((usage.peak_bytes[node] for usage in self.usages if usage.at <= end), default=0)

    def cpu_between(self, begin: float, end: float) -> float:
        """Return the CPU seconds of all processes between two times of the monotonic clock.

        The times are accurate to the interval between two samples.
        """
        spent = [usage.cpu_seconds for usage in self.usages if begin <= usage.at <= end]
        return spent[-1] - spent[0] if spent else 0.0


def memory_and_cpu(pid: int) -> tuple[int, float] | None:
    """Return a process's peak resident memory in bytes and its CPU seconds; None if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    peak = next((line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")), "0")
    ticks = int(stat[11]) + int(stat[12])
    return int(peak) * 1024, ticks / os.sysconf("SC_CLK_TCK")
