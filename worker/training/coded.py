"""Work `exchange`: gradients of blocks, exchanged with the other workers; each worker takes the step itself.

The sums that all workers decode are equal to the bit, in whichever order packets arrive, and so are their
replicas. Nothing changes before the server says that everybody has the sum (`apply`).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ...coding import (
    Exchange,
    from_fixed_point,
    packet_elements,
    plan,
    resent,
    to_fixed_point,
)
from ...optim.optimizer import Optimizer
from ...proto import messages as m
from ...proto.shares import assigned_samples, share
from ...proto.wire import crc32c
from ..metrics import WorkerMetrics
from ..session.receiving import ReceivedPacket
from ..session.session import Session
from .step import Strategy, TrainingStep, all_finite

log = logging.getLogger("gradwire.worker")

Words = npt.NDArray[np.uint32]


def _coding(assignment: m.Assignment) -> m.Coding:
    assert assignment.coding is not None
    return assignment.coding


def _key(assignment: m.Assignment) -> tuple[object, ...]:
    """Return what an assignment's gradients depend on."""
    return (
        *(assignment.version, assignment.epoch, assignment.ranges, assignment.position, assignment.world),
        _coding(assignment).redundancy,
    )


class CodedStrategy(Strategy):
    """Steps that exchange gradients as coded packets; the `PacketHandler` of its session."""

    def __init__(
        self, session: Session, metrics: WorkerMetrics, optimizer: Optimizer, *, give_up: type[Exception]
    ) -> None:
        """Make what the optimizer remembers a part of the replica, so that a snapshot has it too.

        Args:
            session, metrics, give_up: see `Strategy`.
            optimizer: of the replica's parameters; it follows the learning rates of assignments.
        """
        super().__init__(session, metrics, give_up=give_up)
        self._replica = replica = session.replica
        self.least = replica.state.least_samples
        self._optimizer = optimizer
        *self.cuts, self.elements = accumulate(parameter.numel() for parameter in replica.parameters)
        names = [tensor.name for tensor in replica.manifest.tensors]
        replica.include(
            [(f"{what} of {names[index]}", tensor) for what, index, tensor in self._optimizer.state()]
        )
        self._step: CodedStep | None = None
        self._clipped_steps = 0
        session.handle_packets(self)

    @property
    def busy(self) -> bool:
        """Whether others wait for packets of this worker, or it for theirs."""
        step = self._step
        return step is not None and (step.exchange is None or not step.exchange.complete)

    def begin(self, assignment: m.Assignment, samples: int) -> CodedStep:
        """Begin a step, or another exchange of the blocks that the present one has computed."""
        self.session.begun(assignment)
        step = self._step
        if step is not None and _key(step.assignment) == _key(assignment):
            step.assignment = assignment
        else:
            step = self._step = CodedStep(self, assignment, samples)
        if not step.open:
            self.exchange(step)
        return step

    def computed(self, step: CodedStep) -> None:
        """Called when the last block of a step is computed: warn of unusable and clipped gradients."""
        version = step.assignment.version
        if step.unusable:
            log.warning("version %d: %s; such blocks of samples count as zeros", version, step.unusable)
            self.unusable(step.unusable)
        else:
            self.usable()
        if not step.clipped:
            return
        self.metrics.clipped.inc(step.clipped)
        self._clipped_steps += 1
        if self._clipped_steps & (self._clipped_steps - 1) == 0:  # the 1st, 2nd, 4th, 8th, …
            log.warning(
                "version %d: %d elements of gradients were outside of ±10 and were clipped, as in %d steps "
                "so far; gradients are summed over the samples of a block: use a smaller --batch-size",
                *(version, step.clipped, self._clipped_steps),
            )

    def exchange(self, step: CodedStep) -> None:
        """Send the packets that others need, in the exchange that the step's assignment names."""
        self.session.doing("exchanging")
        with self.metrics.during("encoding"):
            for header, words in self._packets(step):
                self.session.send_packet(header, words)
        self.metrics.loss.set(step.loss)
        if not self.busy:
            self._confirm(step)

    def hand_over(self) -> None:
        """Send the replica before leaving: no other worker may have it."""
        self.session.send_snapshot(leaving=True)

    def _packets(self, step: CodedStep) -> Iterator[tuple[m.Packet, Words]]:
        coding, position = _coding(step.assignment), step.assignment.position
        step.plan = resent(step.original, coding.senders, coding.present) if coding.senders else step.original
        step.exchange = Exchange(step.plan, position, step.blocks, self.elements)
        width = packet_elements(self.elements, step.plan.slices)
        for index in step.plan.sent_by[position]:
            terms = () if coding.senders else step.plan.packets[index].terms
            checksums = tuple(step.checksums[block] for block, _ in terms if block in step.checksums)
            header = m.Packet(exchange=coding.exchange, index=index, elements=width, checksums=checksums)
            yield header, step.exchange.encoded(index)

    def _confirm(self, step: CodedStep) -> None:
        """Tell the server that the exchange is complete."""
        assert step.exchange is not None
        checksum = crc32c(self._replica.values())
        exchanged = m.Exchanged(
            crc32c=crc32c([step.exchange.sums().view(np.uint8)], checksum),
            computing_seconds=step.computing_s,
            clipped=step.clipped,
        )
        self.session.confirm(step.assignment, step.samples, step.loss, exchanged)

    # ---- PacketHandler

    def take(self, packet: ReceivedPacket) -> None:
        """Take in a packet. Those of another exchange are passed over."""
        step, header = self._step, packet.header
        self.metrics.raw_down.inc(packet.data.nbytes)
        if step is None or step.exchange is None:
            return
        if header.exchange != _coding(step.assignment).exchange or step.exchange.complete:
            return
        with self.metrics.during("decoding"):
            step.exchange.take(header.index, packet.data)
        if step.exchange.complete:
            self._confirm(step)

    def apply(self, exchange: int, version: int) -> None:
        """Take the step to `version` with the sum of that exchange, if the replica is not there yet."""
        step, replica = self._step, self._replica
        if not exchange or replica.version == version or step is None or step.exchange is None:
            return
        if _coding(step.assignment).exchange != exchange or replica.version != version - 1:
            return
        if not step.exchange.complete:
            return
        total = assigned_samples(step.assignment)
        blocks = len(step.plan.holders)
        bounds = [share(total, block, blocks, self.least) for block in step.plan.blocks]
        samples = sum(end - start for start, end in bounds)
        mean = np.empty(self.elements, np.float32)
        from_fixed_point(step.exchange.sums(), mean, 1.0 / samples if samples else 0.0)
        for parameter, values in zip(replica.parameters, np.split(mean, self.cuts), strict=True):
            parameter.grad = torch.from_numpy(values).view(parameter.shape).to(parameter.device)
        self._optimizer.follow(step.assignment.learning_rate)
        self._optimizer.step()
        self._step = None
        self.session.stepped(version)

    def snapshot(self, version: int) -> None:
        """Send the replica to a server that asks for it."""
        self.session.send_snapshot(leaving=False)


class CodedStep(TrainingStep):
    """The gradients of this worker's blocks at one version, and the exchange of them.

    Attributes:
        assignment: the last one of this version; another exchange of the same blocks has another one.
        samples: number of samples in usable blocks so far.
        loss: mean loss of these, once all blocks are computed.
        original, plan: which packets were to be sent at first, and in the present exchange.
        blocks: sums of gradients in fixed point, by block.
        checksums: CRC-32C of blocks that others compute, too.
        clipped: number of elements outside of the range of fixed point.
        unusable: why a block contributes nothing; empty if none does.
        computing_s: seconds that all blocks took.
        exchange: the present one; None before the first.
    """

    def __init__(self, strategy: CodedStrategy, assignment: m.Assignment, samples: int) -> None:
        """samples: number of samples assigned to all workers of the round."""
        super().__init__(strategy, assignment, 0)
        self._strategy = strategy
        self._began = time.perf_counter()
        self.original = self.plan = plan(assignment.world, _coding(assignment).redundancy)
        held = sorted(self.original.held[assignment.position])
        self.blocks = {block: np.zeros(strategy.elements, np.uint32) for block in held}
        self.checksums: dict[int, int] = {}
        self.loss, self.clipped, self.unusable, self.computing_s = 0.0, 0, "", 0.0
        self.exchange: Exchange | None = None
        bounds = [share(samples, block, len(self.original.holders), strategy.least) for block in held]
        # Blocks that have samples, the last one first.
        self._left = [(block, slice(*each)) for block, each in zip(held, bounds, strict=True)][::-1]
        self._left = [(block, batch) for block, batch in self._left if batch.stop > batch.start]
        self._close_if_computed()

    @property
    def batch(self) -> slice:
        return self._left[-1][1]

    @property
    def seeds(self) -> tuple[int, ...]:
        """Dropout and the like are the same wherever a block is computed."""
        return self.assignment.version, self._left[-1][0]

    def push(self, loss: float, scale: float = 1.0, evaluate: Callable[[], Any] | None = None) -> bool:
        """Add up the gradient of a block; after the last one, send packets. Only scripts, which have no such
        work, give a scale or a closure."""
        block, batch = self._left.pop()
        words = self.blocks[block]
        samples = int(batch.stop - batch.start)
        # Sums are over all tensors: what the loss of a block does not reach is zeros in it.
        gradients = self._strategy.session.replica.gradients()
        usable = False
        if not math.isfinite(loss):
            self.unusable = f"the loss is {loss}"
        elif not all_finite([each for each in gradients if each is not None]):
            self.unusable = "the gradient has an infinity or a NaN"
        else:
            usable = True
            for gradient, part in zip(gradients, np.split(words, self._strategy.cuts), strict=True):
                if gradient is None:
                    continue
                values = gradient.detach().reshape(-1).cpu().numpy()
                self.clipped += to_fixed_point(values, part, float(samples))
            self.loss += loss * samples
            self.samples += samples
        self._close_if_computed()
        if not self.open:
            self._strategy.exchange(self)
        return usable

    def skip(self, why: str) -> None:
        """Never called: only scripts skip, and they have no such work."""
        raise AssertionError(why)

    def _close_if_computed(self) -> None:
        if self._left:
            return
        self.open = False
        if _coding(self.assignment).redundancy > 1:
            self.checksums = {block: crc32c([words.view(np.uint8)]) for block, words in self.blocks.items()}
        self.loss = self.loss / self.samples if self.samples else 0.0
        self.computing_s = time.perf_counter() - self._began
        self._strategy.computed(self)
