"""Coded training: gradients of blocks, exchanged with the other workers, and the optimizer's step taken here.

The sums that all workers decode are equal to the bit, whatever came when, and so are their replicas. Nothing
changes before the server says that everybody has the sum (`apply`).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import torch

from ..coding import Exchange, Plan, Scheme, from_fixed_point, packet_elements, plan, resent, to_fixed_point
from ..optimizer import build_optimizer, optimizer_state, parse_optimizer
from ..proto import messages as m
from ..proto.shares import share
from ..proto.wire import crc32c
from .replica import Replica
from .sharding import Indices

log = logging.getLogger("gradwire.worker")

Words = npt.NDArray[np.uint32]
WARN_EVERY = 100  # steps with clipped gradients


class _Step:
    """The gradients of this worker's blocks at one version, and the exchange of them."""

    def __init__(self, assignment: m.Assignment, original: Plan) -> None:
        self.assignment = assignment  # the last one of this version
        self.original = original
        self.blocks: dict[int, Words] = {}
        self.samples = 0  # of the worker's blocks
        self.loss = 0.0
        self.clipped = 0
        self.computing_seconds = 0.0
        self.computed_at = 0.0
        self.exchange: Exchange | None = None
        self.plan = original

    @property
    def key(self) -> tuple[object, ...]:
        """What its gradients depend on."""
        return _key(self.assignment)


def _key(assignment: m.Assignment) -> tuple[object, ...]:
    coding = assignment.coding
    assert coding is not None
    return (
        *(assignment.version, assignment.epoch, assignment.ranges, assignment.position, assignment.world),
        *(coding.scheme, coding.redundancy),
    )


class CodedTraining:
    def __init__(self, replica: Replica, job: m.Job) -> None:
        """Makes what the optimizer remembers a part of the replica, so that a snapshot has it too."""
        self._replica = replica
        self._optimizer = build_optimizer(parse_optimizer(job.optimizer), replica.parameters, 0.0)
        self._sizes = [parameter.numel() for parameter in replica.parameters]
        self._elements = sum(self._sizes)
        names = [tensor.name for tensor in replica.manifest.tensors]
        replica.include(
            [
                (f"{what} of {names[place]}", tensor)
                for what, place, tensor in optimizer_state(self._optimizer)
            ]
        )
        self._step: _Step | None = None
        self._clipped_steps = 0

    # ---- one step

    def compute(
        self,
        assignment: m.Assignment,
        indices: Indices,
        gradients: Callable[[int, Indices], tuple[float, list[torch.Tensor]]],
    ) -> _Step:
        """The gradient of each block that this worker holds, unless it has them already.

        gradients: of a block and its samples: the mean loss and its gradient. indices: of all samples.
        """
        if self._step is not None and self._step.key == _key(assignment):
            self._step.assignment = assignment
            return self._step
        coding = assignment.coding
        assert coding is not None
        step = _Step(assignment, plan(Scheme[coding.scheme.name], assignment.world, coding.redundancy))
        started = time.perf_counter()
        blocks = len(step.original.holders)
        for block in sorted(step.original.held[assignment.position]):
            start, end = share(len(indices), block, blocks)
            words = np.zeros(self._elements, np.uint32)
            if end > start:
                loss, found = gradients(block, indices[start:end])
                step.clipped += self._to_words(found, end - start, words)
                step.samples += end - start
                step.loss += loss * (end - start)
            step.blocks[block] = words
        step.loss = step.loss / step.samples if step.samples else 0.0
        step.computed_at = time.perf_counter()
        step.computing_seconds = step.computed_at - started
        self._step = step
        self._warn(step)
        return step

    def _to_words(self, gradients: list[torch.Tensor], samples: int, out: Words) -> int:
        """The sum over the samples in fixed point; returns how many elements were clipped."""
        clipped = at = 0
        for gradient, size in zip(gradients, self._sizes, strict=True):
            values = gradient.detach().reshape(-1).cpu().numpy()
            clipped += to_fixed_point(values, out[at : at + size], float(samples))
            at += size
        return clipped

    def _warn(self, step: _Step) -> None:
        if not step.clipped:
            return
        if self._clipped_steps % WARN_EVERY == 0:
            log.warning(
                "version %d: %d elements of the gradients were outside of ±10 and were clipped; "
                "if this goes on, use a smaller --batch-size",
                *(step.assignment.version, step.clipped),
            )
        self._clipped_steps += 1

    def begin(self, step: _Step) -> Iterator[tuple[m.Packet, Words]]:
        """The packets to send in the exchange that the step's assignment is about."""
        coding, position = step.assignment.coding, step.assignment.position
        assert coding is not None
        step.plan = resent(step.original, coding.senders, coding.present) if coding.senders else step.original
        step.exchange = Exchange(step.plan, position, step.blocks, self._elements)
        width = packet_elements(self._elements, step.plan.slices)
        for index in step.plan.sent_by(position):
            header = m.Packet(exchange=coding.exchange, index=index, elements=width)
            yield header, step.exchange.encoded(index)

    def take(self, packet: m.Packet, data: Words) -> _Step | None:
        """Take in a packet; the step, if that was the last one. Those of another exchange are passed over."""
        step = self._step
        if step is None or step.exchange is None or step.assignment.coding is None:
            return None
        if packet.exchange != step.assignment.coding.exchange or step.exchange.complete:
            return None
        step.exchange.take(packet.index, data)
        return step if step.exchange.complete else None

    def report(self, step: _Step) -> m.Exchanged:
        """What the server is told about a complete exchange."""
        assert step.exchange is not None
        checksum = crc32c(self._replica.values())
        return m.Exchanged(
            crc32c=crc32c([step.exchange.sums().view(np.uint8)], checksum),
            computing_seconds=step.computing_seconds,
            exchanging_seconds=time.perf_counter() - step.computed_at,
            clipped=step.clipped,
        )

    def apply(self, exchange: int, version: int) -> None:
        """Take the step to `version` with the sum of that exchange, if the replica is not there yet."""
        step, replica = self._step, self._replica
        if replica.version == version or step is None or step.exchange is None:
            return
        coding = step.assignment.coding
        assert coding is not None
        if coding.exchange != exchange or replica.version != version - 1 or not step.exchange.complete:
            return
        total = step.assignment.samples
        blocks = len(step.plan.holders)
        bounds = [share(total, block, blocks) for block in step.plan.blocks]
        samples = sum(end - start for start, end in bounds)
        mean = np.empty(self._elements, np.float32)
        from_fixed_point(step.exchange.sums(), mean, 1.0 / samples if samples else 0.0)
        at = 0
        for parameter, size in zip(replica.parameters, self._sizes, strict=True):
            values = torch.from_numpy(mean[at : at + size]).view(parameter.shape)
            parameter.grad = values.to(parameter.device)
            at += size
        for group in self._optimizer.param_groups:
            group["lr"] = step.assignment.learning_rate
        self._optimizer.step()
        replica.version = version
        self._step = None

    @property
    def step(self) -> _Step:
        """The running one."""
        assert self._step is not None
        return self._step

    @property
    def exchanging(self) -> bool:
        """Whether others wait for packets of this worker, or it for theirs."""
        step = self._step
        return step is not None and (step.exchange is None or not step.exchange.complete)


def finite(loss: float) -> float:
    """A loss that can be reported."""
    return loss if math.isfinite(loss) else 0.0
