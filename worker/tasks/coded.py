"""Coded training: gradients of blocks, exchanged with the other workers, and the optimizer's step taken here.

The sums that all workers decode are equal to the bit, whatever came when, and so are their replicas. Nothing
changes before the server says that everybody has the sum (`apply`).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from ...coding import (
    Exchange,
    Plan,
    from_fixed_point,
    packet_elements,
    plan,
    resent,
    to_fixed_point,
)
from ...optimizer import Optimizer
from ...proto import messages as m
from ...proto.shares import assigned_samples, share
from ...proto.wire import crc32c
from ..metrics import Metrics
from ..session.receiving import ReceivedPacket
from ..session.session import Session
from .computation import Computation
from .strategy import Strategy

log = logging.getLogger("gradwire.worker")

Words = npt.NDArray[np.uint32]


@dataclass(slots=True, eq=False)
class CodedStep:
    """The gradients of this worker's blocks at one version, and the exchange of them."""

    assignment: m.Assignment  # the last one of this version
    original: Plan
    plan: Plan
    blocks: dict[int, Words] = field(default_factory=dict[int, Words])
    checksums: dict[int, int] = field(default_factory=dict[int, int])  # of those that others compute, too
    samples: int = 0  # of the worker's blocks
    loss: float = 0.0
    clipped: int = 0
    unusable: str = ""  # why a block contributes nothing
    computing_seconds: float = 0.0
    exchange: Exchange | None = None


def _key(assignment: m.Assignment) -> tuple[object, ...]:
    """What gradients depend on."""
    coding = assignment.coding
    assert coding is not None
    return (
        *(assignment.version, assignment.epoch, assignment.ranges, assignment.position, assignment.world),
        coding.redundancy,
    )


class ExchangeWork(Strategy):
    """Work `exchange`; the `PacketHandler` of its session."""

    def __init__(
        self, session: Session, computation: Computation, optimizer: Optimizer, metrics: Metrics
    ) -> None:
        """Makes what the optimizer remembers a part of the replica, so that a snapshot has it too.

        optimizer: of the replica's parameters; it follows the learning rates of assignments.
        """
        super().__init__(session, computation, metrics)
        self._replica = replica = session.replica
        self._least = replica.state.least_samples
        self._optimizer = optimizer
        *self._cuts, self._elements = accumulate(parameter.numel() for parameter in replica.parameters)
        names = [tensor.name for tensor in replica.manifest.tensors]
        replica.include(
            [(f"{what} of {names[place]}", tensor) for what, place, tensor in self._optimizer.state()]
        )
        self._step: CodedStep | None = None
        self._clipped_steps = 0
        session.handle_packets(self)

    @property
    def busy(self) -> bool:
        """Whether others wait for packets of this worker, or it for theirs."""
        step = self._step
        return step is not None and (step.exchange is None or not step.exchange.complete)

    def work(self, assignment: m.Assignment) -> None:
        """Compute, and send what others need."""
        self._session.begun(assignment)
        self._session.doing("computing")
        with self._metrics.during("computing"):
            step = self._compute(assignment)
        self._session.doing("exchanging")
        with self._metrics.during("encoding"):
            for header, data in self._packets(step):
                self._session.send_packet(header, data)
        self._metrics.loss.set(step.loss)
        if not self.busy:
            self._confirm(step)

    def hand_over(self) -> None:
        """Send the replica before leaving: perhaps no other worker has it."""
        self._session.send_snapshot(leaving=True)

    def _compute(self, assignment: m.Assignment) -> CodedStep:
        """The gradient of each block that this worker holds, unless it has them already."""
        if self._step is not None and _key(self._step.assignment) == _key(assignment):
            self._step.assignment = assignment
            return self._step
        coding = assignment.coding
        assert coding is not None
        whole = plan(assignment.world, coding.redundancy)
        step = CodedStep(assignment, original=whole, plan=whole)
        started = time.perf_counter()
        indices = self._computation.indices(assignment)
        blocks = len(step.original.holders)
        for block in sorted(step.original.held[assignment.position]):
            start, end = share(len(indices), block, blocks, self._least)
            words = np.zeros(self._elements, np.uint32)
            if end > start:
                # Dropout and the like are the same wherever a block is computed.
                loss = self._computation.loss(indices[start:end], assignment.version, block)
                # Sums are over all tensors: what the loss of a block does not reach is zeros in it.
                gradients = self._replica.gradients()
                if not math.isfinite(loss):
                    step.unusable = f"the loss is {loss}"
                elif not all(each is None or bool(torch.isfinite(each).all()) for each in gradients):
                    step.unusable = "the gradient has an infinity or a NaN"
                else:
                    for gradient, part in zip(gradients, np.split(words, self._cuts), strict=True):
                        if gradient is None:
                            continue
                        values = gradient.detach().reshape(-1).cpu().numpy()
                        step.clipped += to_fixed_point(values, part, float(end - start))
                    step.loss += loss * (end - start)
                    step.samples += end - start
            step.blocks[block] = words
            if coding.redundancy > 1:
                step.checksums[block] = crc32c([words.view(np.uint8)])
        step.loss = step.loss / step.samples if step.samples else 0.0
        step.computing_seconds = time.perf_counter() - started
        self._step = step
        self._watch(step)
        return step

    def _watch(self, step: CodedStep) -> None:
        """Say what is wrong with the gradients of a step."""
        version = step.assignment.version
        if step.unusable:
            log.warning("version %d: %s; such blocks of samples count as zeros", version, step.unusable)
            self._skipped.add(step.unusable)
        else:
            self._skipped.over()
        if not step.clipped:
            return
        self._metrics.clipped.inc(step.clipped)
        self._clipped_steps += 1
        if self._clipped_steps & (self._clipped_steps - 1) == 0:  # the 1st, 2nd, 4th, 8th, …
            log.warning(
                "version %d: %d elements of gradients were outside of ±10 and were clipped, as in %d steps "
                "so far; gradients are summed over the samples of a block: use a smaller --batch-size",
                *(version, step.clipped, self._clipped_steps),
            )

    def _packets(self, step: CodedStep) -> Iterator[tuple[m.Packet, Words]]:
        """Those to send in the exchange that the step's assignment is about."""
        coding, position = step.assignment.coding, step.assignment.position
        assert coding is not None
        step.plan = resent(step.original, coding.senders, coding.present) if coding.senders else step.original
        step.exchange = Exchange(step.plan, position, step.blocks, self._elements)
        width = packet_elements(self._elements, step.plan.slices)
        for index in step.plan.sent_by[position]:
            terms = () if coding.senders else step.plan.packets[index].terms
            checksums = tuple(step.checksums[block] for block, _ in terms if block in step.checksums)
            header = m.Packet(exchange=coding.exchange, index=index, elements=width, checksums=checksums)
            yield header, step.exchange.encoded(index)

    def take(self, packet: ReceivedPacket) -> None:
        """Take in a packet. Those of another exchange are passed over."""
        step, header = self._step, packet.header
        self._metrics.raw_down.inc(packet.data.nbytes)
        if step is None or step.exchange is None or step.assignment.coding is None:
            return
        if header.exchange != step.assignment.coding.exchange or step.exchange.complete:
            return
        with self._metrics.during("decoding"):
            step.exchange.take(header.index, packet.data)
        if step.exchange.complete:
            self._confirm(step)

    def _confirm(self, step: CodedStep) -> None:
        """Tell the server that the exchange is complete."""
        assert step.exchange is not None
        checksum = crc32c(self._replica.values())
        exchanged = m.Exchanged(
            crc32c=crc32c([step.exchange.sums().view(np.uint8)], checksum),
            computing_seconds=step.computing_seconds,
            clipped=step.clipped,
        )
        self._session.confirm(step.assignment, step.samples, step.loss, exchanged)

    def apply(self, exchange: int, version: int) -> None:
        """Take the step to `version` with the sum of that exchange, if the replica is not there yet."""
        step, replica = self._step, self._replica
        if not exchange or replica.version == version or step is None or step.exchange is None:
            return
        coding = step.assignment.coding
        assert coding is not None
        if coding.exchange != exchange or replica.version != version - 1 or not step.exchange.complete:
            return
        total = assigned_samples(step.assignment)
        blocks = len(step.plan.holders)
        bounds = [share(total, block, blocks, self._least) for block in step.plan.blocks]
        samples = sum(end - start for start, end in bounds)
        mean = np.empty(self._elements, np.float32)
        from_fixed_point(step.exchange.sums(), mean, 1.0 / samples if samples else 0.0)
        for parameter, values in zip(replica.parameters, np.split(mean, self._cuts), strict=True):
            parameter.grad = torch.from_numpy(values).view(parameter.shape).to(parameter.device)
        self._optimizer.follow(step.assignment.learning_rate)
        self._optimizer.step()
        self._step = None
        self._session.stepped(version)

    def snapshot(self, version: int) -> None:
        """Send the replica to a server that asks for it."""
        self._session.send_snapshot(leaving=False)
