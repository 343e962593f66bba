"""The decision whether compressing is worth its time (`--compressor auto`), for one unit and for all units.

Compressing a unit costs seconds of the training thread and saves seconds of the link. How much of either a
step waits for depends on the work that overlaps, at this worker, at the server and at other workers.
The answer for all units is therefore measured, in windows of steps:

    running   if the known times allow the other way (compressed or float32) to be faster by more than
              `MARGIN`, a trial starts
    trial     the other way runs for one window. If it is faster by more than `MARGIN`, it stays. Otherwise
              the previous way returns, and a pause begins
    paused    there is no trial for a number of windows, which doubles with each failed trial, up to
              `LONGEST_PAUSE`

Single units are not tried: `worth` compares the seconds that a unit costs with those that it saves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

MARGIN = 0.02  # fraction of a step's time; a smaller gain changes nothing
LONGEST_PAUSE = 64  # windows between two trials, at most
HYSTERESIS = 1.25  # factor by which the other way has to be better before a unit changes


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """Measurements of one window of steps at a worker: means per step, in seconds.

    Attributes:
        codec_s: time spent compressing, measured when units were last compressed.
        waited_s: time spent waiting for the server.
        dense_link_s: upload time of all units as float32; 0 if the link was never seen to limit anything.
        sent_link_s: upload time of the compressed units; 0 likewise.
    """

    step_s: float
    codec_s: float
    waited_s: float
    dense_link_s: float
    sent_link_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The way in which all units are sent at present, and the state of the trials.

    Attributes:
        compressing: True if units are compressed, False if all go as float32.
        reference_s: seconds of a step the previous way, during a trial; 0 if there is no trial.
        backoff: windows of the pause after the last failed trial; the next failed trial doubles it.
        pause: windows that are left until a trial may start.
    """

    compressing: bool = True
    reference_s: float = 0.0
    backoff: int = 1
    pause: int = 0

    @property
    def trial(self) -> bool:
        return self.reference_s > 0


def worth(codec_s: float, saved_bytes: float, byte_s: float, *, compressed: bool) -> bool:
    """Return True if compressing a unit is worth its time, given the bytes that it saves on a link of
    `byte_s`. To change the present way, the other one has to be better by the factor `HYSTERESIS`."""
    saved_s = saved_bytes * byte_s
    return codec_s <= saved_s * HYSTERESIS if compressed else codec_s * HYSTERESIS < saved_s


def other_way(compressing: bool, seen: Seen) -> float:
    """Return a lower bound of the seconds of a step if it were taken the other way than was seen."""
    if compressing:
        return max(seen.step_s - seen.codec_s, seen.dense_link_s)
    saved_s = min(seen.waited_s, max(0.0, seen.dense_link_s - seen.sent_link_s))
    return seen.step_s - saved_s + seen.codec_s


def decide(choice: Choice, seen: Seen) -> Choice:
    """Return the choice for the next window, given the present choice and the last window's measurements."""
    # 1. The last window was a trial: keep its way if it was faster, else restore the previous way and pause.
    if choice.trial:
        if seen.step_s < (1 - MARGIN) * choice.reference_s:
            return Choice(compressing=choice.compressing)
        backoff = min(2 * choice.backoff, LONGEST_PAUSE)
        return Choice(compressing=not choice.compressing, backoff=backoff, pause=backoff)
    # 2. Pausing: no trial yet.
    if choice.pause:
        return replace(choice, pause=choice.pause - 1)
    # 3. Even at best the other way gains too little.
    if other_way(choice.compressing, seen) >= (1 - MARGIN) * seen.step_s:
        return choice
    # 4. Start a trial of the other way.
    return Choice(compressing=not choice.compressing, reference_s=seen.step_s, backoff=choice.backoff)
