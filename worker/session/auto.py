"""`--compressor auto`: measures the time that compressing takes and saves, and decides where to send float32.

A unit is a group of neighbouring tensors that are compressed together. `planning/worth` decides by the times
that are measured here, in windows of steps. Windows end at the same versions for all workers of a job, so
that all workers try the same choice at the same time. Because measurements decide, no two runs of a job are
equal to the bit.

A unit that is sent as float32 includes its whole residual (`ModelCompressor.send_whole`). The compressor's
state of its tensors stays unchanged until they are compressed again.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

from ...compressors import ModelCompressor, Payload
from ...compressors.packing import Packing
from ...planning.worth import Choice, Seen, decide, worth

log = logging.getLogger("gradwire.worker")

WINDOW = 50  # versions between two decisions
FIRST = 10  # versions of the first window: the durations of the first steps tell little
TRIAL = 6  # versions for which the other choice is tried
SWITCHING = 2  # Steps after a switch that are not measured: parts of the earlier choice are still being sent.
KEPT = 0.9  # Share of the measured seconds per byte that is kept from window to window.
HOPELESS = 1.5  # A trial ends early once a step takes this many times as long as before the trial.


class Auto:
    """Measures steps, and decides which units (groups of tensors) are compressed. Belongs to one thread.

    The methods `waited`, `compressed` and `begin` report events; `begin` also decides when a window ends.

    Attributes:
        choice: True if units are compressed at present, and whether that is a trial.
    """

    def __init__(
        self,
        compressor: ModelCompressor,
        name: str,
        sent: Callable[[], tuple[int, float]],
        clock: Callable[[], float] = time.perf_counter,
        packing: Packing | None = None,
    ) -> None:
        """
        Args:
            sent: returns the bytes written to the network so far, and the seconds so far during which there
                were bytes to write.
            packing: of the chunks that are sent; None for no packing.
        """
        self.choice = Choice()
        self._compressor, self._name, self._sent, self._clock = compressor, name, sent, clock
        self._plan = 0  # Number of the plan whose units are measured.
        self._whole = frozenset[int]()  # Units that are sent as float32.
        self._codec: dict[int, float] = {}  # By unit, seconds of its last compression.
        self._bytes: dict[int, int] = {}  # By unit, bytes of its last payloads.
        self._until: int | None = None  # Version at which the present window ends.
        self._skip = 1  # Number of steps that are not measured.
        self._began: float | None = None  # When the present step began.
        self._steps: list[float] = []  # Seconds of each step of the window.
        self._waits: list[float] = []  # Seconds of waiting for the server in each of these steps.
        self._waited = 0.0  # Seconds of waiting in the present step.
        self._before = 0, 0.0  # Bytes and seconds of sending at the last measurement of the link.
        self._byte_s = 0.0  # Seconds that the link takes for a byte; 0 if unknown.
        self._packing, self._saved = packing, 0
        self._left = 1.0  # Share of the bytes of compressed units that was left after packing.

    # ---- events

    def now(self) -> float:
        """Return the clock's present time, in seconds."""
        return self._clock()

    def waited(self, seconds: float) -> None:
        """Add seconds of waiting for the server to the present step."""
        self._waited += seconds

    def compressed(self, index: int, seconds: float, sent: Mapping[int, Sequence[Payload]]) -> None:
        """Note how long compressing took, and how many bytes it made.

        A tensor's gradient completes its unit, or, for a compressor that needs the whole model, all units. In
        the second case the seconds are divided among the units in proportion to their elements.
        """
        plan, number = self._compressor.plan, self._compressor.unit_of[index]
        units = [number] if sent.keys() <= {*plan.units[number].parts} else range(len(plan.units))
        elements = sum(plan.units[each].end - plan.units[each].start for each in units)
        for each in units:
            unit = plan.units[each]
            if each not in self._whole and elements and all(part in sent for part in unit.parts):
                self._codec[each] = seconds * (unit.end - unit.start) / elements
                self._bytes[each] = sum(one.data.size for part in unit.parts for one in sent[part])

    def begin(self, version: int) -> None:
        """Note that a step begins. If a window ends here, first decide which units are compressed."""
        now = self._clock()
        if self._began is not None:
            if self._skip:
                self._skip -= 1
            else:
                self._steps.append(now - self._began)
                self._waits.append(self._waited)
        self._began, self._waited = now, 0.0
        plan = self._compressor.plan
        if plan.number != self._plan:  # a new plan has other units: measure anew
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

    # ---- decisions

    def _start(self, until: int) -> None:
        self._until = until
        self._steps.clear()
        self._waits.clear()

    def _decide(self, version: int) -> None:
        """Decide by the window's measurements whether to compress, and start the next window."""
        self._measure()
        seen, before = self._seen(), self.choice
        self.choice = decide(before, seen)
        self._start(version + TRIAL if self.choice.trial else _border(version, WINDOW))
        self._skip = SWITCHING if self.choice.compressing != before.compressing else 0
        self._choose()
        if before.trial or self.choice.trial:
            how = self._name if self.choice.compressing else "float32"
            action = f"trying {how}" if self.choice.trial else f"using {how} from now on"
            log.info("compressor auto: %s; steps took %.1f ms", action, 1000 * seen.step_s)

    def _measure(self) -> None:
        """Measure the seconds that the link takes for a byte.

        A few bytes go to buffers and seem to take no time, so a larger measurement decays slowly.
        """
        (before, then), (count, seconds) = self._before, self._sent()
        self._before = count, seconds
        found = (seconds - then) / (count - before) if count > before else 0.0
        self._byte_s = max(found, KEPT * self._byte_s)
        if self._packing is not None:
            saved, self._saved = self._packing.saved_bytes - self._saved, self._packing.saved_bytes
            if self.choice.compressing and count > before:
                self._left = (count - before) / (count - before + saved)

    def _seen(self) -> Seen:
        byte_s, plan = self._byte_s, self._compressor.plan
        sent = self._left * sum(self._bytes.values())
        return Seen(
            step_s=statistics.median(self._steps),
            codec_s=sum(self._codec.values()),
            waited_s=statistics.median(self._waits),
            dense_link_s=4 * plan.elements * byte_s,
            sent_link_s=sent * byte_s,
        )

    def _choose(self) -> None:
        """Choose the units that are sent as float32, and tell the compressor.

        1. The choice is not to compress: all units.
        2. The link's speed is unknown, so that units cannot be compared: none.
        3. Otherwise: units whose compression takes longer than the time that it saves on the link.
        """
        plan, byte_s = self._compressor.plan, self._byte_s
        units = range(len(plan.units))
        if not self.choice.compressing:
            whole = frozenset(units)
        elif not byte_s:
            whole = frozenset[int]()
        else:
            whole = frozenset(
                number
                for number in units
                if number in self._codec
                and not worth(
                    self._codec[number],
                    4 * (plan.units[number].end - plan.units[number].start)
                    - self._left * self._bytes[number],
                    byte_s,
                    compressed=number not in self._whole,
                )
            )
            if whole != self._whole != frozenset(units):
                log.info(
                    "compressor auto: using %s for %d of %d units, float32 for the rest",
                    *(self._name, len(units) - len(whole), len(units)),
                )
        self._whole = whole
        self._compressor.send_whole(whole)


def _border(version: int, versions: int) -> int:
    """Return the next multiple of `versions` after `version`, which is the same for all workers."""
    return (version // versions + 1) * versions
