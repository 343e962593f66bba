"""`--compressor auto`: measures what compressing takes and saves, and leaves units as float32 where it loses.

`planning/worth` decides by what is measured here. Windows end at the same versions for all workers of a job,
so that they try the same at the same time. What is measured decides, so no job is the same to the bit twice.

A unit that is sent as float32 takes along all that is owed of it (`ModelCompressor.send_whole`). What the
compressor remembers of its tensors waits until they are compressed again.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

from ...compressors import ModelCompressor, Payload
from ...planning.worth import Choice, Seen, decide, worth

log = logging.getLogger("gradwire.worker")

WINDOW = 50  # versions
FIRST = 10  # of the first window: what the first steps take tells little
TRIAL = 6
SWITCHING = 2  # steps in which what was sent the other way is still under way
KEPT = 0.9  # of what a byte takes, from window to window
HOPELESS = 1.5  # times as long as before: a trial need not go on


class Auto:
    """Not for several threads."""

    def __init__(
        self,
        compressor: ModelCompressor,
        name: str,
        sent: Callable[[], tuple[int, float]],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """
        Args:
            compressor: its `send_whole` is called with the units to leave as float32.
            name: of the compressor, for the log.
            sent: bytes that went out while something waited to go out, and seconds of that, so far.
            clock: in seconds.
        """
        self.choice = Choice()
        self._compressor, self._name, self._sent, self._clock = compressor, name, sent, clock
        self._plan = 0
        self._whole = frozenset[int]()
        self._codec: dict[int, float] = {}  # by unit, seconds of its last compression
        self._bytes: dict[int, int] = {}  # and its bytes
        self._until: int | None = None
        self._skip = 1
        self._began: float | None = None
        self._steps: list[float] = []
        self._waits: list[float] = []
        self._waited = 0.0
        self._before = 0, 0.0  # what had been sent by then
        self._byte_s = 0.0

    # ---- what happens

    def now(self) -> float:
        return self._clock()

    def waited(self, seconds: float) -> None:
        """Count seconds of waiting for the server."""
        self._waited += seconds

    def compressed(self, index: int, seconds: float, sent: Mapping[int, Sequence[Payload]]) -> None:
        """The gradient of a tensor has made parts complete: those of its unit, or of all, which then have the
        seconds in proportion to their elements."""
        plan, number = self._compressor.plan, self._compressor.unit_of[index]
        units = [number] if sent.keys() <= {*plan.units[number].parts} else range(len(plan.units))
        elements = sum(plan.units[each].end - plan.units[each].start for each in units)
        for each in units:
            unit = plan.units[each]
            if each not in self._whole and elements and all(part in sent for part in unit.parts):
                self._codec[each] = seconds * (unit.end - unit.start) / elements
                self._bytes[each] = sum(one.data.size for part in unit.parts for one in sent[part])

    def begin(self, version: int) -> None:
        """Begin a step. If that is due, decide first which units are compressed."""
        now = self._clock()
        if self._began is not None:
            if self._skip:
                self._skip -= 1
            else:
                self._steps.append(now - self._began)
                self._waits.append(self._waited)
        self._began, self._waited = now, 0.0
        plan = self._compressor.plan
        if plan.number != self._plan:  # its units are others
            self._plan = plan.number
            self._codec.clear()
            self._bytes.clear()
            self._start(_border(version, FIRST))
            self._choose()
        if self._until is None:
            self._start(_border(version, FIRST))
        hopeless = self.choice.trial and self._steps and self._steps[-1] > HOPELESS * self.choice.reference_s
        if (hopeless or version >= (self._until or 0)) and self._steps:
            self._decide(version)

    # ---- what follows

    def _start(self, until: int) -> None:
        self._until = until
        self._steps.clear()
        self._waits.clear()

    def _decide(self, version: int) -> None:
        self._measure()
        seen, before = self._seen(), self.choice
        self.choice = decide(before, seen)
        self._start(version + TRIAL if self.choice.trial else _border(version, WINDOW))
        self._skip = SWITCHING if self.choice.compressing != before.compressing else 0
        self._choose()
        if before.trial or self.choice.trial:
            how = self._name if self.choice.compressing else "float32"
            why = "is tried" if self.choice.trial else "it is from now on"
            log.info("compressor auto: %s %s; steps took %.1f ms", how, why, 1000 * seen.step_s)

    def _measure(self) -> None:
        """Measure the seconds of a byte on the link. A few bytes go to buffers and seem to take no time, so a
        measurement with many is forgotten slowly."""
        (before, then), (count, seconds) = self._before, self._sent()
        self._before = count, seconds
        found = (seconds - then) / (count - before) if count > before else 0.0
        self._byte_s = max(found, KEPT * self._byte_s)

    def _seen(self) -> Seen:
        byte_s, plan = self._byte_s, self._compressor.plan
        sent = sum(self._bytes.values())
        return Seen(
            step_s=statistics.median(self._steps),
            codec_s=sum(self._codec.values()),
            waited_s=statistics.median(self._waits),
            dense_link_s=4 * plan.elements * byte_s,
            sent_link_s=sent * byte_s,
        )

    def _choose(self) -> None:
        """Choose the units that are sent as float32."""
        plan, byte_s = self._compressor.plan, self._byte_s
        units = range(len(plan.units))
        if not self.choice.compressing:
            whole = frozenset(units)
        elif not byte_s:  # nothing tells one unit from another
            whole = frozenset[int]()
        else:
            whole = frozenset(
                number
                for number in units
                if number in self._codec
                and not worth(
                    self._codec[number],
                    4 * (plan.units[number].end - plan.units[number].start) - self._bytes[number],
                    byte_s,
                    compressed=number not in self._whole,
                )
            )
            if whole != self._whole != frozenset(units):
                log.info(
                    "compressor auto: %s for %d of %d units", self._name, len(units) - len(whole), len(units)
                )
        self._whole = whole
        self._compressor.send_whole(whole)


def _border(version: int, versions: int) -> int:
    """Return the next multiple, which is the same for all workers."""
    return (version // versions + 1) * versions
