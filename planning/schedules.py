"""Schedules: the order in which pieces of gradients travel, so that the next forward pass can begin early.

Layers are in forward order. A layer's gradient is cut into pieces of equal size, but for the last (3). One
message is on the link at a time. It begins once backward has the gradients in it and the previous message has
been sent (4). It takes the time of its bytes, and `Link.start_s` for each piece in it. Forward of a layer
begins once that of the previous layer is done, and all of its own pieces have arrived (5). The time to be
minimized is that from the beginning of backward to the end of the next forward pass (6).

fifo         whole layers, in the order in which backward produces them: wait-free backpropagation
p3           piece by piece. Of the gradients that are ready, those that the next forward pass needs first
             are sent first: priority, and preemption where a piece ends
two-phase    while backward runs, the same as p3, except that a layer may be *raised*. A raised layer goes
             whole, in one message, before all gradients that were ready when it could have been sent.

             Once backward is over, the rest of each layer goes in one message, in forward order. A search
             from the last layer to the second raises a layer if that makes the iteration shorter

The worth of merging pieces. Algorithm 3 of the paper merges the waiting pieces of a layer to pay for one
start instead of several. On Gradwire's wire a piece is a part: the parts of a merged message still travel one
by one, each with its start, so a merge saves nothing and only fixes an order. For any layers and link, then:

- two-phase <= p3 <= fifo. The search begins with the order of p3. And with fifo the first layer arrives last,
  at the time at which any schedule that never leaves the link idle has sent everything.
- p3 ends at most the time of one piece after any other schedule. An iteration ends at the largest sum of a
  layer's arrival and the forward time from it on, so the layers have due times in forward order. Sending the
  layer that is due first is optimal if a message may be interrupted, and p3 waits for one piece at most.

The gain of two-phase over p3 is therefore at most the time of one piece.

Sources: Jayarajan et al., "Priority-based Parameter Propagation for Distributed DNN Training" (MLSys 2019).
Peng et al., "A Generic Communication Scheduler for Distributed DNN Training Acceleration" (SOSP 2019); for
two-phase the paper on multi-step delayed updates, algorithms 2 and 3.

Deviations from the last one. Equation (4) adds the time of the previous message. Algorithm 2 ends with the
second layer, as its text says. A layer that was preempted continues as soon as the link is free, not only
once backward is over. A merged message pays for as many starts as it has pieces, see above.
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
    """A rule for the order of messages. `raised`: by raised layer, the layer just before which it is sent."""

    name: Name
    piece_bytes: float = math.inf
    raised: dict[int, int] = field(default_factory=dict[int, int])


@dataclass(frozen=True, slots=True)
class Message:
    """One message, from its beginning to its arrival, in seconds since the beginning of backward."""

    layer: int
    pieces: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class MessageTimeline:
    """A simulated iteration: messages as they were sent, the beginning of each layer's forward pass, and the
    end of the last, in seconds since the beginning of backward."""

    messages: tuple[Message, ...]
    forward_s: tuple[float, ...]
    end_s: float


def run(layers: Sequence[Layer], link: Link, schedule: Schedule) -> MessageTimeline:
    """Simulate an iteration that follows `schedule`; return its messages and times.

    Raises:
        ValueError: the size of a piece is not positive.
    """
    if not schedule.piece_bytes > 0:
        raise ValueError(f"piece_bytes: expected a size above 0, got {schedule.piece_bytes:g}")
    ready = produced(layers)
    over = max(ready, default=0.0)
    left = [_pieces(layer, schedule) for layer in layers]
    messages: list[Message] = []
    free, backward_over = 0.0, False
    pending = len(layers)  # layers before this index have no gradients yet
    waiting: list[tuple[_Key, int]] = []  # a heap of layers that have gradients to send
    while waiting or pending:
        now = free if waiting else max(free, ready[pending - 1])
        while pending and ready[pending - 1] <= now:
            pending -= 1
            heapq.heappush(waiting, (_key(pending, schedule, backward_over), pending))
        if now >= over and not backward_over:
            backward_over = True
            waiting = [(_key(layer, schedule, backward_over), layer) for _, layer in waiting]
            heapq.heapify(waiting)
        _, layer = waiting[0]
        whole = schedule.name == "fifo" or (
            schedule.name == "two-phase" and (backward_over or layer in schedule.raised)
        )
        pieces = left[layer] if whole else 1
        free = (
            now + link.byte_s * _bytes(layers[layer], schedule, left[layer], pieces) + pieces * link.start_s
        )
        left[layer] -= pieces
        if not left[layer]:
            heapq.heappop(waiting)
        messages.append(Message(layer, pieces, now, free))
    return _with_forward(layers, over, messages)


_Key = tuple[int, bool, int]


def _key(layer: int, schedule: Schedule, backward_over: bool) -> _Key:
    """Return the sort key of a layer that has gradients to send; the layer with the smallest key is sent
    next."""
    if schedule.name == "fifo":
        return -layer, False, 0
    if schedule.name == "two-phase" and not backward_over:
        # A raised layer goes just before the one that it was raised over.
        return schedule.raised.get(layer, layer), layer not in schedule.raised, layer
    return layer, False, 0


def _pieces(layer: Layer, schedule: Schedule) -> int:
    """Return the number of pieces of a layer (3); an empty layer has one."""
    return max(1, math.ceil(layer.sent_bytes / schedule.piece_bytes))


def _bytes(layer: Layer, schedule: Schedule, left: int, pieces: int) -> float:
    """Return the bytes of the next `pieces` pieces of a layer that has `left` pieces left; the last may be
    smaller."""
    begun = _pieces(layer, schedule) - left
    if pieces == left:
        return layer.sent_bytes - begun * schedule.piece_bytes if begun else layer.sent_bytes
    return pieces * schedule.piece_bytes


def _with_forward(layers: Sequence[Layer], over: float, messages: Sequence[Message]) -> MessageTimeline:
    """Return the timeline of these messages, with the times of the forward pass (5)."""
    arrived = [0.0] * len(layers)
    for message in messages:
        arrived[message.layer] = max(arrived[message.layer], message.end_s)
    begins: list[float] = []
    done = over
    for layer, at in zip(layers, arrived, strict=True):
        begins.append(max(done, at))
        done = begins[-1] + layer.forward_s
    return MessageTimeline(tuple(messages), tuple(begins), done)


def two_phase(layers: Sequence[Layer], link: Link, piece_bytes: float) -> Schedule:
    """Search for the layers to raise (algorithm 2), by at most one simulated iteration for each layer; return
    the best two-phase schedule found, which is neither slower than p3 nor than fifo."""
    ready = produced(layers)
    found = Schedule(name="two-phase", piece_bytes=piece_bytes)
    least = run(layers, link, found)
    layer = len(layers) - 1
    while layer > 0:
        over = _raised_over(layer, layers, link, ready, found, least)
        if over is not None:
            tried = Schedule(name="two-phase", piece_bytes=piece_bytes, raised={**found.raised, layer: over})
            timeline = run(layers, link, tried)
            if timeline.end_s < least.end_s:
                found, least = tried, timeline
                layer = over  # layers between finish backward meanwhile, and wait for the second phase
        layer -= 1
    return found


def _raised_over(
    layer: int,
    layers: Sequence[Layer],
    link: Link,
    ready: Sequence[float],
    schedule: Schedule,
    now: MessageTimeline,
) -> int | None:
    """Return the layer over which `layer` would be raised (7); return None if backward is over by then.

    It is the last layer whose gradient backward has finished when the whole of `layer` would have been sent.
    """
    start = min(message.start_s for message in now.messages if message.layer == layer)
    pieces = _pieces(layers[layer], schedule)
    end = start + pieces * link.start_s + link.byte_s * layers[layer].sent_bytes
    if end > ready[0]:
        return None
    return max((each for each in range(1, layer + 1) if ready[each] < end <= ready[each - 1]), default=None)
