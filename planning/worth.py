"""Whether compressing is worth its time (`--compressor auto`): of a unit, and of all.

A unit that is compressed takes seconds of the training thread and saves seconds of the link. How much of
these a step waits for depends on what overlaps with what, at this worker, at the server and at the others. So
the answer for all units is measured: where the other way may be faster by more than `MARGIN`, judging by the
times that are known, it is tried for a few steps, and kept if it is. A trial in vain doubles the time to the
next. Units are compared with each other by what they take and save.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

MARGIN = 0.02  # of a step: what is gained by less is left as it is
LONGEST_PAUSE = 64  # windows between two trials
HYSTERESIS = 1.25  # how many times as good the other way has to be for a unit


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What a window of steps has shown, per step, in seconds.

    step_s: from one to the next. codec_s: compressing, as long as it was done. waited_s: for the server.
    dense_link_s, sent_link_s: what float32 and what is compressed take on the way up, as far as the link is
    known to limit anything; 0 if it never was seen to.
    """

    step_s: float
    codec_s: float
    waited_s: float
    dense_link_s: float
    sent_link_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What is done, and since when.

    compressing: or all goes as float32. reference_s: a step the other way, during a trial; 0 if it is none.
    backoff: windows between trials. pause: how many of them are left.
    """

    compressing: bool = True
    reference_s: float = 0.0
    backoff: int = 1
    pause: int = 0

    @property
    def trial(self) -> bool:
        return self.reference_s > 0


def worth(codec_s: float, saved_bytes: float, byte_s: float, *, compressed: bool) -> bool:
    """Whether a unit is worth compressing: its seconds against the link's. compressed: whether it is now."""
    saved_s = saved_bytes * byte_s
    return codec_s <= saved_s * HYSTERESIS if compressed else codec_s * HYSTERESIS < saved_s


def other_way(compressing: bool, seen: Seen) -> float:
    """The least seconds that a step may take the other way."""
    if compressing:
        return max(seen.step_s - seen.codec_s, seen.dense_link_s)
    saved_s = min(seen.waited_s, max(0.0, seen.dense_link_s - seen.sent_link_s))
    return seen.step_s - saved_s + seen.codec_s


def decide(choice: Choice, seen: Seen) -> Choice:
    """What to do in the next window, after one that has shown this."""
    if choice.trial:
        if seen.step_s < (1 - MARGIN) * choice.reference_s:
            return Choice(compressing=choice.compressing)
        backoff = min(2 * choice.backoff, LONGEST_PAUSE)
        return Choice(compressing=not choice.compressing, backoff=backoff, pause=backoff)
    if choice.pause:
        return replace(choice, pause=choice.pause - 1)
    if other_way(choice.compressing, seen) >= (1 - MARGIN) * seen.step_s:
        return choice
    return Choice(compressing=not choice.compressing, reference_s=seen.step_s, backoff=choice.backoff)
