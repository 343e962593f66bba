"""Work `exchange`: gradients of blocks, exchanged with the other workers; each worker takes the step itself.

A block is a range of a round's samples. A worker computes the gradient sums of its blocks, and sends packets
from which other workers decode the sum over all blocks. The decoded sums are equal to the bit, in whichever
order packets arrive, and so are the replicas. No replica changes before the server says that all workers have
the sum (`apply`).
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

from ...coded.arithmetic import (
    Exchange,
    from_fixed_point,
    packet_elements,
    plan,
    resent,
    to_fixed_point,
)
from ...optim.optimizer import Optimizer
from ...proto import messages as m
from ...proto.shares import assigned_samples, block_share
from ...proto.wire import crc32c
from ..metrics import WorkerMetrics
from ..session.receiving import ReceivedPacket
from ..session.session import Session
from .step import Loss, Strategy, TrainingStep, all_finite, loss_of

log = logging.getLogger("gradwire.worker")

Words = npt.NDArray[np.uint32]


def _coding(assignment: m.Assignment) -> m.Coding:
    """Return the parameters of an assignment's exchange; every assignment of this work has them."""
    assert assignment.coding is not None
    return assignment.coding


def _key(assignment: m.Assignment) -> tuple[object, ...]:
    """Return the fields on which an assignment's gradients depend: equal keys mean equal gradients."""
    return (
        *(assignment.version, assignment.epoch, assignment.ranges, assignment.position, assignment.world),
        *(_coding(assignment).redundancy, _coding(assignment).sizes),
    )


class CodedStrategy(Strategy):
    """The strategy of work `exchange`: exchanges gradients as coded packets, and steps the replica.

    It handles its session's packets, as the `PacketHandler`.

    Attributes:
        least: smallest number of samples that a block may have.
        cuts: indices at which a flat array of all elements is split into the parameters.
    """

    def __init__(
        self, session: Session, metrics: WorkerMetrics, optimizer: Optimizer, *, give_up: type[Exception]
    ) -> None:
        """Include the optimizer's state in the replica, so that snapshots contain it. optimizer: optimizer of
        the replica's parameters, which takes its learning rates from assignments."""
        super().__init__(session, metrics, give_up=give_up)
        self._replica = replica = session.replica
        self.least = replica.state.least_samples
        self._optimizer = optimizer
        *self.cuts, self.elements = accumulate(parameter.numel() for parameter in replica.parameters)
        names = [tensor.name for tensor in replica.manifest.tensors]
        replica.include(
            [(f"{kind} of {names[index]}", tensor) for kind, index, tensor in self._optimizer.state()]
        )
        self._step: CodedStep | None = None
        self._clipped_steps = 0
        session.packets.handler = self

    @property
    def busy(self) -> bool:
        """True if an exchange is incomplete: other workers wait for this one's packets, or it for theirs."""
        step = self._step
        return step is not None and (step.exchange is None or not step.exchange.complete)

    def begin(self, assignment: m.Assignment, samples: int) -> CodedStep:
        """Begin the step that answers an assignment.

        If the assignment repeats the exchange of the present step's gradients, return the present step: its
        blocks are not computed again, and its packets are sent at once.

        samples: number of samples assigned to all workers of the round.
        """
        self.session.mark_answered(assignment)
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
            self.count_unusable(step.unusable)
        else:
            self.reset_unusable()
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
        """Send this worker's packets of the exchange that the step's assignment names.

        Confirm the exchange at once if this worker needs no packet of another worker.
        """
        self.session.doing("exchanging")
        with self.metrics.during("encoding"):
            for header, words in self._packets(step):
                self.session.packets.send(header, words)
        self.metrics.loss.set(step.loss)
        if not self.busy:
            self._confirm(step)

    def hand_over(self) -> None:
        """Send the replica to the server before leaving, because no other worker may have it."""
        self.session.packets.send_snapshot(leaving=True)

    def _packets(self, step: CodedStep) -> Iterator[tuple[m.Packet, Words]]:
        """Begin the exchange that the step's assignment names, and yield this worker's packets."""
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
        """Add another worker's packet to the present exchange; confirm the exchange once it is complete.

        A packet of another exchange is ignored.
        """
        step, header = self._step, packet.header
        self.metrics.raw_down.inc(packet.data.nbytes)
        self.metrics.payload_down.inc(packet.data.nbytes)
        if step is None or step.exchange is None:
            return
        if header.exchange != _coding(step.assignment).exchange or step.exchange.complete:
            return
        with self.metrics.during("decoding"):
            step.exchange.take(header.index, packet.data)
        if step.exchange.complete:
            self._confirm(step)

    def apply(self, exchange: int, version: int) -> None:
        """Take the optimizer's step to `version` with the sum of an exchange, as the server has ordered.

        Nothing happens if the replica is not at the previous version, or if the exchange is not the present
        one or is incomplete. exchange: number of the exchange whose sum all workers have; 0 for none.
        """
        step, replica = self._step, self._replica
        if not exchange or replica.version == version or step is None or step.exchange is None:
            return
        if _coding(step.assignment).exchange != exchange or replica.version != version - 1:
            return
        if not step.exchange.complete:
            return
        total = assigned_samples(step.assignment)
        blocks = len(step.plan.holders)
        coding = _coding(step.assignment)
        bounds = [block_share(coding, total, block, blocks, self.least) for block in step.plan.blocks]
        samples = sum(end - start for start, end in bounds)
        mean = np.empty(self.elements, np.float32)
        from_fixed_point(step.exchange.sums(), mean, 1.0 / samples if samples else 0.0)
        for parameter, values in zip(replica.parameters, np.split(mean, self.cuts), strict=True):
            parameter.grad = torch.from_numpy(values).view(parameter.shape).to(parameter.device)
        self._optimizer.follow(step.assignment.learning_rate)
        self._optimizer.step()
        self._step = None
        self.session.packets.stepped(version)

    def snapshot(self, version: int) -> None:
        """Send the replica, with the optimizer's state, to the server, which has requested it."""
        self.session.packets.send_snapshot(leaving=False)


class CodedStep(TrainingStep):
    """The gradients of this worker's blocks at one version, and their exchange. A batch is a block.

    Attributes:
        assignment: last assignment of this version; each exchange of the same blocks has its own.
        loss: sum of the losses of these samples; their mean loss once all blocks are computed.
        blocks: sums of gradients in fixed point, by block: uint32, shape (elements,).
        checksums: CRC-32C of each block, if other workers compute it too; otherwise empty.
        clipped: number of elements so far that were outside of the range of fixed point.
    """

    def __init__(self, strategy: CodedStrategy, assignment: m.Assignment, samples: int) -> None:
        self._strategy = strategy
        self._began = time.perf_counter()
        self.original = self.plan = plan(assignment.world, _coding(assignment).redundancy)
        held = sorted(self.original.held[assignment.position])
        self.blocks = {block: np.zeros(strategy.elements, np.uint32) for block in held}
        self.checksums: dict[int, int] = {}
        self.loss, self.clipped, self.unusable, self.computing_s = 0.0, 0, "", 0.0
        self.exchange: Exchange | None = None
        coding, blocks = _coding(assignment), len(self.original.holders)
        bounds = [block_share(coding, samples, block, blocks, strategy.least) for block in held]
        computed = [(block, slice(*each)) for block, each in zip(held, bounds, strict=True)]
        computed = [(block, batch) for block, batch in computed if batch.stop > batch.start]
        self._computed = [block for block, _ in computed]  # blocks that have samples, in the batches' order
        super().__init__(strategy, assignment, 0, [batch for _, batch in computed])
        self._close_if_computed()

    @property
    def seeds(self) -> tuple[int, ...]:
        """Version and block: every worker that computes a block draws the same random numbers."""
        return self.assignment.version, self._computed[self.at]

    def push(self, loss: Loss, scale: float = 1.0, evaluate: Callable[[], Any] | None = None) -> bool:
        """Add the present block's gradient to its sum; after the last block, send the packets. Returns True
        if loss and gradient of the block are finite; otherwise the block counts as zeros. Raises the
        strategy's `give_up` if too many steps in a row have contributed nothing.

        Args:
            scale: ignored: only scripts scale gradients, and scripts do not take this work.
            evaluate: ignored: only scripts pass a closure.
        """
        words, batch = self.blocks[self._computed[self.at]], self.batch
        self.at += 1
        samples = int(batch.stop - batch.start)
        # Sums cover all tensors: a tensor that the loss of this block does not reach counts as zeros.
        gradients = self._strategy.session.replica.gradients()
        usable, found = False, loss_of(loss)
        if found is None or not math.isfinite(found):
            self.unusable = f"the loss is {found}"
        elif not all_finite([each for each in gradients if each is not None]):
            self.unusable = "the gradient has an infinity or a NaN"
        else:
            usable = True
            for gradient, part in zip(gradients, np.split(words, self._strategy.cuts), strict=True):
                if gradient is None:
                    continue
                values = gradient.detach().reshape(-1).cpu().numpy()
                self.clipped += to_fixed_point(values, part, float(samples))
            self.loss += found * samples
            self.samples += samples
        self._close_if_computed()
        if not self.open:
            self._strategy.exchange(self)
        return usable

    def skip(self, why: str) -> None:
        """Raise AssertionError: only scripts skip batches, and scripts do not take this work."""
        raise AssertionError(why)

    def _close_if_computed(self) -> None:
        """Close the step if no block is left to compute: calculate mean loss, checksums and duration."""
        if self.at < len(self._batches):
            return
        self.open = False
        if _coding(self.assignment).redundancy > 1:
            self.checksums = {block: crc32c([words.view(np.uint8)]) for block, words in self.blocks.items()}
        self.loss = self.loss / self.samples if self.samples else 0.0
        self.computing_s = time.perf_counter() - self._began
        self._strategy.computed(self)
