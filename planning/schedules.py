"""Schedules: in which order pieces of gradients travel, so that the next forward pass can begin early.

Layers are in forward order. A layer's gradient is cut into pieces of equal size, but for the last (3). One
message is on the link at a time. It begins once backward has the gradients in it and the message before is
through (4). Forward of a layer begins once that of the layer before it is done, and all of its pieces have
come (5). What is to be small is the time from the beginning of backward to the end of the next forward (6).

fifo         layers whole, as backward produces them: wait-free backpropagation
p3           piece by piece; of what is there, what the next forward pass needs first: priority, and
             preemption where a piece ends
two-phase    until backward is over like p3, but layers may be *raised*: one that is goes whole, in one
             message, before everything that was there when it could be through; then, layer by layer in
             forward order, all that is left of a layer in one message. Which layers are raised is searched
             for from the last to the second, and kept if the iteration becomes shorter

Sources: Jayarajan et al., "Priority-based Parameter Propagation for Distributed DNN Training" (MLSys 2019);
Peng et al., "A Generic Communication Scheduler for Distributed DNN Training Acceleration" (SOSP 2019); the
paper on multi-step delayed updates, algorithms 2 and 3 for two-phase. Differences from that, whose formulas
have slips: (4) adds the time of the message before, not of this one; (6) is the end of the next forward less
the beginning of backward; algorithm 2 ends with the second layer, as its text says, since before the first
there is nothing to be raised over. A layer that was preempted goes on as soon as the link is free, and not
only once backward is over.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from .profile import Layer, Link, produced

Name = Literal["fifo", "p3", "two-phase"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """piece_bytes: of a full piece. raised: layers that go whole, and the layer before which each goes."""

    name: Name
    piece_bytes: float = math.inf
    raised: dict[int, int] = field(default_factory=dict[int, int])


@dataclass(frozen=True, slots=True)
class Message:
    """pieces: how many of the layer's, which are on the link from `start_s` to `end_s`."""

    layer: int
    pieces: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class MessageTimeline:
    """Seconds from the beginning of backward. forward_s: when that of each layer begins. end_s: when the
    last is done."""

    messages: tuple[Message, ...]
    forward_s: tuple[float, ...]
    end_s: float


def run(layers: Sequence[Layer], link: Link, schedule: Schedule) -> MessageTimeline:
    """What becomes of a schedule."""
    if not schedule.piece_bytes > 0:
        raise ValueError(f"piece_bytes: expected more than 0, got {schedule.piece_bytes:g}")
    ready = produced(layers)
    over = max(ready, default=0.0)
    left = [_pieces(layer, schedule) for layer in layers]
    messages: list[Message] = []
    free, at_last = 0.0, False  # whether backward is over
    to_come = len(layers)  # layers in front of this one have no gradients yet
    there: list[tuple[_Key, int]] = []  # a heap
    while there or to_come:
        now = free if there else max(free, ready[to_come - 1])
        while to_come and ready[to_come - 1] <= now:
            to_come -= 1
            heapq.heappush(there, (_key(to_come, schedule, at_last), to_come))
        if now >= over and not at_last:
            at_last = True
            there = [(_key(place, schedule, at_last), place) for _, place in there]
            heapq.heapify(there)
        _, place = there[0]
        whole = schedule.name == "fifo" or (
            schedule.name == "two-phase" and (at_last or place in schedule.raised)
        )
        pieces = left[place] if whole else 1
        free = now + link.byte_s * _bytes(layers[place], schedule, left[place], pieces) + link.start_s
        left[place] -= pieces
        if not left[place]:
            heapq.heappop(there)
        messages.append(Message(place, pieces, now, free))
    return _with_forward(layers, over, messages)


_Key = tuple[int, bool, int]


def _key(place: int, schedule: Schedule, at_last: bool) -> _Key:
    """Of the layers that are there, the one with the least goes next."""
    if schedule.name == "fifo":
        return -place, False, 0
    if schedule.name == "two-phase" and not at_last:
        # A raised layer goes just before the one that it was raised over.
        return schedule.raised.get(place, place), place not in schedule.raised, place
    return place, False, 0


def _pieces(layer: Layer, schedule: Schedule) -> int:
    """(3); an empty layer is a message all the same."""
    return max(1, math.ceil(layer.sent_bytes / schedule.piece_bytes))


def _bytes(layer: Layer, schedule: Schedule, left: int, pieces: int) -> float:
    """Of the next pieces, the last of which may be smaller."""
    begun = _pieces(layer, schedule) - left
    if pieces == left:
        return layer.sent_bytes - begun * schedule.piece_bytes if begun else layer.sent_bytes
    return pieces * schedule.piece_bytes


def _with_forward(layers: Sequence[Layer], over: float, messages: Sequence[Message]) -> MessageTimeline:
    come = [0.0] * len(layers)
    for message in messages:
        come[message.layer] = max(come[message.layer], message.end_s)
    begins: list[float] = []
    done = over
    for layer, at in zip(layers, come, strict=True):
        begins.append(max(done, at))
        done = begins[-1] + layer.forward_s
    return MessageTimeline(tuple(messages), tuple(begins), done)


def two_phase(layers: Sequence[Layer], link: Link, piece_bytes: float) -> Schedule:
    """Algorithm 2: which layers are raised. As many runs as there are layers."""
    ready = produced(layers)
    found = Schedule(name="two-phase", piece_bytes=piece_bytes)
    least = run(layers, link, found)
    place = len(layers) - 1
    while place > 0:
        over = _raised_over(place, layers, link, ready, least)
        if over is not None:
            tried = Schedule(name="two-phase", piece_bytes=piece_bytes, raised={**found.raised, place: over})
            timeline = run(layers, link, tried)
            if timeline.end_s < least.end_s:
                found, least = tried, timeline
                place = over  # those between have finished backward meanwhile, and wait for the second phase
        place -= 1
    return found


def _raised_over(
    place: int, layers: Sequence[Layer], link: Link, ready: Sequence[float], now: MessageTimeline
) -> int | None:
    """(7): the last layer that backward is through with when the whole of this one is there; None if backward
    is over by then."""
    start = min(message.start_s for message in now.messages if message.layer == place)
    end = start + link.seconds(layers[place].sent_bytes)
    if end > ready[0]:
        return None
    return max((each for each in range(1, place + 1) if ready[each] < end <= ready[each - 1]), default=None)


def best(layers: Sequence[Layer], link: Link, piece_bytes: float) -> Schedule:
    """Of two-phase, p3 and fifo the one that ends first."""
    candidates = (
        two_phase(layers, link, piece_bytes),
        Schedule(name="p3", piece_bytes=piece_bytes),
        Schedule(name="fifo"),
    )
    return min(candidates, key=lambda each: run(layers, link, each).end_s)
