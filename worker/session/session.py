"""The session: a worker's participation in a job, as one object that a training loop or a script drives."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from ...common.free_memory import FreeMemory, give_back
from ...common.parts import Plan
from ...compressors import PushTerms
from ...proto import messages as m
from ..metrics import WorkerMetrics
from .auto import Auto
from .calls import Earlier
from .compression import Compression
from .connection import Connection
from .own_state import OwnState
from .packets import Packets
from .pushes import Push, Pushes
from .receiving import Received, ReceivedPacket
from .replica import Replica
from .saving import Saving
from .state_exchange import StateExchange
from .timing import StepTimes
from .updates import Updates
from .waiting import WaitingLog

log = logging.getLogger("gradwire.worker")

RESIDUAL_EVERY = 50  # pushes between two measurements of the residual's norm, which reads the whole residual


class Session:
    """A worker's participation in a job, from the reply to its join until it leaves.

    The owner, a training loop or script, calls these methods on one thread of its choice:

    | method | when |
    |---|---|
    | `begin` | once, first |
    | `next` | repeatedly, while no step is half done |
    | `take_in` | in the forward pass of a step begun before its assignment has arrived |
    | `begin_push` | for each assignment with samples; then `Push.add`, and `commit` or `abandon` |
    | `ask` | for further batches, before an assignment with samples is answered |
    | `skip`, `confirm` | to answer an assignment without a push, also after an abandoned one |
    | `evaluated`, `report` | if an assignment has an `evaluate_epoch` |
    | `leave` | from any thread or signal handler; then until `finished_leaving` |

    Only `next` and `take_in` change the replica. The session calls no code of the owner's, except the
    `PacketHandler` of coded mode (`packets`). The file `pushes` has the life of a push. An open push keeps
    the plan under which it was begun, although `next` adopts a new one.

    `begin`, `next` and `take_in` raise Refused if the server ended the membership or refused a push,
    UnreachableError if there was no stream for `give_up_s`, and RuntimeError if the server violates the
    protocol. `Push.add` raises NonFiniteGradient: abandon the push, and answer with `skip`.

    Attributes:
        local_rates: returns the learning rates of a script's local steps, by group, which commits carry.
        batch: checksum of the present step's first batch, which the next commit reports; 0 for none.
        accumulate: number of batches that an optimizer step takes, for the server; 0 if not declared. Set it
            before `begin`.
    """

    def __init__(
        self,
        connection: Connection,
        replica: Replica,
        compression: Compression,
        metrics: WorkerMetrics,
        *,
        initialize: bool,
        auto: str = "",
        buffers: str = "mean",
        own: OwnState | None = None,
        earlier: Callable[[], Earlier] | None = None,
    ) -> None:
        """auto: name of the compressor that `--compressor auto` switches off where it loses time; "" for a
        fixed compressor."""
        self.replica = replica
        self.leaving = False
        self.batch = self.accumulate = 0
        self._connection = connection
        self.compression = compression
        replica.shared = compression.shared_state(replica.manifest)
        self._metrics = metrics
        self._initialize = initialize
        self._auto = (
            Auto(compression.compressor, auto, lambda: connection.sent, packing=connection.packing)
            if auto
            else None
        )
        self._pushes = Pushes(connection, compression, metrics, self._auto)
        self.packets = Packets(connection, replica, metrics)
        self._updates = Updates(replica, connection, metrics)
        self._state = StateExchange(connection, replica, buffers)
        self.saving = Saving(connection, replica, compression, self._state, self._pushes, own)
        self._earlier = earlier
        self.evaluations: dict[int, m.EpochStatus] = {}
        self.best: Mapping[str, float] = {}
        self.local_rates: Callable[[], tuple[float, ...]] = tuple
        self._answered = 0  # id of the last assignment that was answered
        self._reconnects = 0
        self._held: m.Assignment | None = None  # assignment that waits until the replica is at its version
        self._waiting = WaitingLog()
        self._free = FreeMemory(replica.manifest.raw_bytes // 4)

    # ---- state, for the owner

    @property
    def open_pushes(self) -> int:
        """Number of committed pushes whose outcome has not arrived; `held_back` excludes their gradients."""
        return len(self._pushes)

    @property
    def last_counts(self) -> bool:
        """True if the server has accepted the last push."""
        return self._pushes.last_accepted == self._pushes.seq

    @property
    def held_back(self) -> float:
        """Euclidean norm of the residual and the carried changes: of the gradients that this worker has
        computed and not pushed."""
        return self.compression.norm

    def residuals(self, factor: float) -> list[torch.Tensor]:
        """Return a copy of the residual of each parameter of the replica, times `factor`, in the parameter's
        shape; an empty list if nothing has been held back."""
        ledger, replica = self.compression.ledger, self.replica
        if ledger.unused:
            return []
        pairs = zip(replica.parameters, replica.manifest.ends, strict=False)
        return [
            ledger.residual[end - each.numel() : end].to(each.device).view_as(each) * factor
            for each, end in pairs
        ]

    @property
    def finished_leaving(self) -> bool:
        """True if `leave` was called, every push has its outcome, and no residual and no carried change is
        left."""
        return self.leaving and not self._pushes and self.compression.empty

    def is_new(self, assignment: m.Assignment) -> bool:
        """Return True if an assignment has samples and was not answered before."""
        return bool(assignment.ranges) and assignment.id > self._answered

    def doing(self, activity: str) -> None:
        """Set the activity that heartbeats report, such as "computing", and note progress."""
        self._connection.activity = activity

    def moved(self) -> None:
        """Note that the owner's thread makes progress now."""
        self._connection.moved()

    # ---- receiving and answering assignments

    def begin(self) -> None:
        """Upload the initial parameters if the server requests them, and report that this worker can work."""
        if self._initialize:
            self._initialize = False
            elements = self.replica.manifest.elements
            log.info("uploading the initial parameters: %d elements", elements)
            self.doing("uploading initial parameters")
            state = self.replica.state.values(frozen=True)
            if self._connection.initialize(
                self.replica.manifest,
                self.replica.values(),
                state,
                self.replica.state.least_samples,
                None if self._earlier is None else self._earlier(),
            ):
                self.replica.version = 0
                self._connection.stepped(0)
                self._state.mark_current()
                self._metrics.raw_up.inc(self.replica.manifest.raw_bytes)
        give_back()  # of the model's own memory, which the replica has replaced
        if any(self.compression.compressor.feedback):
            self.compression.ledger.reserve()
        restored = self.saving.restored is not None
        known = {} if self.replica.shared is None else {"shared": self.replica.shared.sizes}
        manifest = self.replica.manifest
        self._connection.ready(manifest, restored=restored, accumulate=self.accumulate, **known)
        log.info("ready for work")

    def next(self, timeout_s: float) -> m.Assignment | None:
        """Receive and process the next message from the server; save this worker's state if that is due.
        Returns an assignment at whose version the replica is, or one with `finished` set when the job is
        done. None if another message was processed, or if no message arrived in time.
        """
        if not self.saving.by_owner:
            self.saving.write()
        held = self._released()  # an assignment may have arrived in `take_in`
        if held is None:
            self._take(timeout_s, early=False)
            if not self.saving.by_owner:
                self.saving.write()
        return held or self._released()

    def take_in(self, index: int, version: int, timeout_s: float) -> bool:
        """Process messages, applying parts of updates early, until one parameter is at a version.

        Args:
            version: version to wait for: the one after the replica's.
            timeout_s: seconds between checks whether waiting still makes sense.

        Returns:
            True if all parts of the parameter are at `version`. False if that will not happen yet: `next`
            will return an assignment at the present version or the job's end, the worker has finished
            leaving, or early parts were undone.
        """
        undone = self.replica.undone
        while not self.replica.is_at(index, version):
            at = self.replica.version
            held = self._held is not None and (self._held.finished or self._held.version == at)
            if held or at != version - 1 or self.replica.undone != undone or self.finished_leaving:
                return False
            self._take(timeout_s, early=True)
        return True

    def _take(self, timeout_s: float, *, early: bool) -> None:
        """Wait for a message and process it. early: apply parts before their version is complete."""
        activity = self._connection.activity
        self.doing("waiting")
        with self._metrics.during("waiting"):
            began = 0.0 if self._auto is None else self._auto.now()
            message = self._connection.next(timeout_s)
            if self._auto is not None:
                self._auto.waited(self._auto.now() - began)
        self.doing(activity if early else "working")
        self._metrics.reconnects.inc(self._connection.reconnects - self._reconnects)
        self._reconnects = self._connection.reconnects
        match message:
            case Received():
                self._updates.add(message, early=early)
                held, version = self._held, self.replica.version
                if held is not None and not held.finished and (version or 0) > held.version:
                    # The stream broke before the assignment's version was complete here: it is outdated.
                    self._held = None
            case Plan():
                self._updates.adopt(message)
                if self.packets.handler is None:  # coded mode pushes no parts
                    self.compression.compressor.adopt(message)
            case m.Assignment():
                self._waiting.over()
                answered = not message.finished and message.id <= self._answered
                # The server may repeat an answered assignment although the replica has passed its version:
                # parts of the next version arrive before the server has decided on the push.
                if not (answered and (self.replica.version or 0) > message.version):
                    self._held = message
            case m.Outcome():
                self._pushes.settle(message)
            case m.Waiting():
                self._waiting.say(message.text, starting=not self.replica.version)
            case m.Save():
                self.saving.request(message.version)
            case m.Welcome():
                self._held = None
                self._updates.go_back(message.version)
            case m.Evaluations():
                self.evaluations.update({each.epoch: each for each in message.results})
                self.best = message.best
            case m.InitializeRequest():
                self._initialize = True
                self.begin()
            case ReceivedPacket() if self.packets.handler is not None:
                self.packets.handler.take(message)
            case m.SnapshotRequest() if self.packets.handler is not None:
                self.packets.handler.apply(message.apply, message.version)
                self._at(message.version, "requested a snapshot of")
                self.packets.handler.snapshot(message.version)
            case None:
                pass
            case _:
                kind = type(message).__name__
                raise RuntimeError(f"the server sent a message of type {kind} in a job without coded packets")

    def begin_push(
        self, assignment: m.Assignment, terms: PushTerms, learning_rates: Sequence[float] = ()
    ) -> Push:
        """Open a push of mean gradients (`Pushes.begin`); while leaving, it includes the whole residual."""
        if self.replica.shared is not None:
            self.compression.compressor.bases = self.replica.shared.bases
        return self._pushes.begin(assignment, terms, learning_rates, leaving=self.leaving)

    def commit(
        self, push: Push, loss: float | None, *, computing_s: float = 0.0, batches: int = 0, steps: int = 0
    ) -> bool:
        """Commit a push, after all of its gradients were added. Returns True if payloads were sent. False if
        the compressor's delay keeps all gradients in the residual until a later version.

        Args:
            computing_s: seconds that local steps took, where the mode sets their number by it; otherwise 0.
            batches: number of the assignment's batches that the push stands for; 0 for all.
            steps: number of optimizer steps that a script has taken with them; 0 if unknown.
        """
        sent = push.holds_payloads
        # A push without payloads counts no samples: a later push carries their gradients.
        samples = push.samples if sent else 0
        self._answer(push, samples, loss, computing_seconds=computing_s, batches=batches, steps=steps)
        return sent

    def abandon(self, push: Push) -> None:
        """Discard a push before its commit, and tell the server; the residual is as before `begin_push`."""
        self._pushes.abandon(push)

    def skip(self, assignment: m.Assignment, *, batches: int = 0, steps: int = 0) -> None:
        """Answer an assignment without a gradient; none of its samples counts. The numbers are those of
        `commit`."""
        self._answer(self._pushes.empty(assignment), 0, None, batches=batches, steps=steps)

    def ask(self, assignment: m.Assignment, batches: int, wanted: int, steps: int) -> None:
        """Ask for further batches of an assignment, which `next` returns with them; or as exhausted, or
        another assignment, if there are none.

        Args:
            batches: number of batches that this worker has of it.
            wanted: number of further batches.
            steps: number of local steps that it has taken with its batches.
        """
        request = m.More(assignment=assignment.id, batches=batches, wanted=wanted, steps=steps)
        self._connection.repeat(request)

    def confirm(self, assignment: m.Assignment, samples: int, loss: float, exchanged: m.Exchanged) -> None:
        """Answer an assignment whose gradients were exchanged as coded packets. samples: number of samples in
        this worker's blocks."""
        self._answer(self._pushes.empty(assignment), samples, loss, exchanged=exchanged)

    def evaluated(self, epoch: int) -> AbstractContextManager[None]:
        """Return a context in which the model has the job's buffers, for evaluating the server's model."""
        return self._state.evaluated(epoch)

    def report(self, evaluation: m.Evaluation) -> None:
        """Send the result of an evaluation, and send the last one again after a reconnect."""
        self._connection.repeat(evaluation)

    def profile(self, times: StepTimes, push: Push) -> None:
        """Send the measured durations of the last steps, if a profile is due."""
        if times.due and not push.assignment.parts:
            densities = self.compression.compressor.sent_shares(push.assignment.progress)
            self._connection.profile(times.profile(densities, push.sent_bytes))

    def leave(self) -> None:
        """Make the next push the last one, with the whole residual, so that no gradient is lost."""
        self.leaving = True

    def mark_answered(self, assignment: m.Assignment) -> None:
        """Note that an assignment's exchange has begun, or that it ends without an answer, so that `is_new`
        is False if it is sent again."""
        self._answered = assignment.id

    # ---- inside

    def _released(self) -> m.Assignment | None:
        """Return the waiting assignment if the replica has its version and plan; otherwise None.

        Called before `next` returns: it also checks for drift, undoes early parts and prepares the buffers.
        """
        assignment = self._held
        if assignment is None:
            return None
        if self.packets.handler is not None:
            self.packets.handler.apply(assignment.apply, assignment.version)
        if not assignment.finished:
            if self.replica.version is None or self.replica.version < assignment.version:
                return None
            if self.replica.plan_number < assignment.plan:
                return None
            if self._updates.invalidate_if_drifted(assignment):
                return None
            self._at(assignment.version, "assigned work at")
            self.saving.begin_work(assignment.version)
            self._updates.count()
            self._metrics.epoch.set(assignment.epoch)
        self.replica.go_back()
        self._held = None
        if self.is_new(assignment):
            self._state.before_work(assignment)
        return assignment

    def _at(self, version: int, order: str) -> None:
        """Raise RuntimeError unless the replica is at the version that the server's order names."""
        if version != self.replica.version:
            raise RuntimeError(
                f"the server {order} version {version}, the replica is at {self.replica.version}"
            )

    def _answer(self, push: Push, samples: int, loss: float | None, **more: Any) -> None:
        """Commit a push, after uploading the buffers that belong to it."""
        if samples:
            self._state.before_commit(push.seq, push.assignment.collection)
        rates = self.local_rates() if samples else ()
        self._pushes.commit(push, samples=samples, loss=loss, local_rates=rates, batch=self.batch, **more)
        self.batch = 0
        self._answered = push.assignment.id
        self._free.limit()
        self._metrics.loss.set(math.nan if loss is None else loss)
        if push.seq % RESIDUAL_EVERY == 1:
            self._metrics.residual_norm.set(self.held_back)
