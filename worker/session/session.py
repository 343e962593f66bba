"""The session: a worker's part in a job, as one object that a training loop or a user's own script drives."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ...compressors import Compressed, Plan
from ...proto import messages as m
from ...proto.transfer import digest
from ..metrics import WorkerMetrics
from .auto import Auto
from .compression import Compression
from .connection import Connection, Earlier
from .memory import FreeMemory
from .outcomes import OpenPushes
from .own_state import OwnState
from .pushing import Pushing
from .receiving import Received, ReceivedPacket
from .replica import Replica
from .saving import Saving
from .state_exchange import StateExchange
from .timing import StepTimes
from .updates import Updates
from .waiting import WaitingLog

log = logging.getLogger("gradwire.worker")

RESIDUAL_EVERY = 50  # pushes between measurements of the residual, which reads all of it


class PacketHandler(Protocol):
    """Handles coded packets. `Session.next` calls it."""

    def apply(self, exchange: int, version: int) -> None:
        """Step to `version`, unless the replica is there: all members have that exchange's sums. 0: none."""
        ...

    def take(self, packet: ReceivedPacket) -> None:
        """Take in a packet of another worker."""
        ...

    def snapshot(self, version: int) -> None:
        """Send the replica, which is at `version`, to the server."""
        ...


class Session:
    """A worker's part in a job, from the reply to its join until it leaves. This docstring is the contract.

    The owner, on one thread of its choice, calls

        begin                        once: uploads the initial parameters if the server asks for them
        next                         whenever no step is half done
        take_in                      in the forward pass of a step that was begun before its assignment has
                                     come; this and `next` alone change the replica
        begin_step                   for each assignment that has samples; then `add` its gradients to the
                                     step, in any order, and `commit` or `abandon` it. Parts leave as soon as
                                     they are complete
        skip or confirm              to answer an assignment without a step, or after one that was abandoned
        evaluated, report            what `evaluate_epoch` of an assignment asks for
        leave                        from any thread or signal handler: the next push is to be the last

    and heeds `finished_leaving`. Nothing here calls the owner's code, but for the `PacketHandler` that an
    exchange of coded packets registers with `handle_packets`. The network lives on a thread of its own, so
    that heartbeats go out while the owner computes; payloads belong to the session until it has the outcome.

    Parts are those of the last plan that arrived. `next` adopts a new plan between the updates that it came
    between; an open push keeps the plan that it was made under.

    Any number of pushes may be open. `next` settles their outcomes in whichever order they come: a push
    that came too late is put back into the residual ledger, one that was not needed is forgotten, a damaged
    part is sent again as the same bytes. Parts of a push that the server does without are kept, and not sent.
    After a reconnect, the parts that the server lacks are sent again.

    `begin`, `next` and `take_in` raise Refused (the server ended the membership for good, or refused a push
    for another reason than those), UnreachableError (no stream for `give_up_s`), and RuntimeError for a
    server that breaks the protocol. `add` raises NonFiniteGradient, and leaves the ledger as it was before
    the step: abandon that, and answer with `skip`.

    Attributes:
        replica: the parameters, at `replica.version`.
        leaving: whether `leave` was called.
        seq: number of the last push, from 1; 0 before the first.
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
        """
        Args:
            connection: has joined the job.
            compression: of gradients of the replica.
            auto: name of the compressor that is left where it loses; "" if it never is.
            buffers: as the job has it.
            initialize: whether the server has asked for the initial parameters.
            own: where this worker writes down what the server has not; None if nowhere.
            earlier: what it brings from another job, if it begins this one; None for nothing.
        """
        self.replica = replica
        self.leaving = False
        self.seq = 0
        self._connection = connection
        self._compression = compression
        self._metrics = metrics
        self._initialize = initialize
        self._packets: PacketHandler | None = None
        self._pushes = OpenPushes(connection, compression, metrics)
        self._updates = Updates(replica, connection, metrics)
        self._state = StateExchange(connection, replica, buffers)
        self.saving = Saving(connection, replica, compression, self._state, self._pushes, own)
        self._earlier = earlier
        self._answered = 0  # id of the last assignment that was
        self._reconnects = 0
        self._held: m.Assignment | None = None  # until its version is whole
        self._waiting = WaitingLog()
        self._auto = Auto(compression.compressor, auto, lambda: connection.sent) if auto else None
        self._free = FreeMemory(2 * replica.manifest.raw_bytes)

    # ---- what the owner may know

    @property
    def open_pushes(self) -> int:
        """Number of pushes whose outcome has not arrived. A worker that leaves pushes all of its residual, so
        these may hold what `held_back` does not count."""
        return len(self._pushes)

    @property
    def last_accepted(self) -> int:
        """Number of the last push that counts; 0 before the first."""
        return self._pushes.last_accepted

    @property
    def held_back(self) -> float:
        """Euclidean norm of the residual: what this worker has computed and not pushed."""
        return self._compression.ledger.norm()

    @property
    def finished_leaving(self) -> bool:
        """Whether `leave` was called and everything has been handed over."""
        return self.leaving and not self._pushes and self._compression.ledger.empty

    def is_new(self, assignment: m.Assignment) -> bool:
        """Whether an assignment has samples and was not answered before."""
        return bool(assignment.ranges) and assignment.id > self._answered

    def doing(self, activity: str) -> None:
        """Name the activity that heartbeats report."""
        self._connection.activity = activity

    def moved(self) -> None:
        """Note that the owner makes progress."""
        self._connection.moved()

    # ---- the course of things

    def begin(self) -> None:
        """Upload the initial parameters if the server asks for them; say that work may come."""
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
                self._state.begun()
                self._metrics.raw_up.inc(self.replica.manifest.raw_bytes)
        self._connection.ready(self.replica.manifest, restored=self.saving.restored is not None)
        log.info("ready for work")

    def next(self, timeout_s: float) -> m.Assignment | None:
        """Take in what comes next.

        Returns:
            An assignment, at whose version the replica is, or one that says that the job is done. None when
            something else was taken in, or nothing came for `timeout_s`.
        """
        if not self.saving.by_owner:
            self.saving.write()
        held = self._released()  # if it came in `take_in`
        if held is None:
            self._take(timeout_s, early=False)
            if not self.saving.by_owner:
                self.saving.write()
        return held or self._released()

    def take_in(self, index: int, version: int, timeout_s: float) -> bool:
        """Take in what comes until the parameter with this number is at the next version; other parts of it
        that come meanwhile are applied, too. timeout_s: after which it looks whether it still makes sense.

        Returns:
            Whether it is. Otherwise something else comes first: `next` will return work at the present
            version, or the job or this worker's part in it is over, or the replica is another one now.
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
        """Wait for a message and take it in. early: whether a part is applied before its version is whole."""
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
                    # Its version was lost when the stream broke, and the server has given it up.
                    self._held = None
            case Plan():
                self._updates.adopt(message)
                if self._packets is None:  # otherwise nothing is pushed in parts
                    self._compression.compressor.adopt(message)
            case m.Assignment():
                self._waiting.over()
                answered = not message.finished and message.id <= self._answered
                # An answered assignment may be sent again at a version that is over: parts of the next
                # version arrive before the server has decided on the push.
                if not (answered and (self.replica.version or 0) > message.version):
                    self._held = message
            case m.Outcome():
                self._pushes.settle(message)
            case m.Waiting():
                self._waiting.say(message.text, starting=not self.replica.version)
            case m.Save():
                self.saving.ask(message.version)
            case m.Welcome():
                self._held = None
                self._updates.go_back(message.version)
            case m.InitializeRequest():
                self._initialize = True
                self.begin()
            case ReceivedPacket() if self._packets is not None:
                self._packets.take(message)
            case m.SnapshotRequest() if self._packets is not None:
                self._packets.apply(message.apply, message.version)
                self._at(message.version, "asked for a snapshot of")
                self._packets.snapshot(message.version)
            case None:
                pass
            case _:
                raise RuntimeError(f"the server sent a {type(message).__name__} in a job without packets")

    def begin_step(
        self,
        assignment: m.Assignment,
        samples: int,
        *,
        rank: int,
        version: int,
        step: int,
        learning_rates: Sequence[float] = (),
    ) -> Pushing:
        """Begin to push mean gradients over `samples` samples; all of the ledger too when leaving.

        Args:
            rank, version: what random numbers depend on, besides the job's seed.
            step: what a compressor's delay counts.
            learning_rates: of the server's step, by parameter group of the manifest, where the owner has a
                scheduler; none for what the job's schedule says. All workers have the same ones at a version.
        """
        if self._auto is not None:
            self._auto.begin(step)
        compressing = self._compression.begin(
            assignment, samples, rank=rank, version=version, step=step, leaving=self.leaving
        )
        if self.leaving:  # all that is owed goes, which is more than what its pace was found for
            self._connection.hurry()
        self.seq += 1
        self._pushes.making = self.seq
        return Pushing(
            self._connection,
            self._metrics,
            self.seq,
            assignment,
            samples,
            compressing,
            self._auto,
            learning_rates,
        )

    def commit(self, pushing: Pushing, loss: float, *, computing_s: float = 0.0) -> bool:
        """Push what the step holds.

        Args:
            computing_s: seconds behind it, where the mode goes by them.

        Returns:
            Whether something was sent; otherwise the compressor holds all of it back until a later version.
        """
        self._pushes.making = None
        sent = pushing.commit(
            self._compression.ledger.slices, undoable=self._compression.undoable(pushing.assignment)
        )
        # A push without payloads has no samples: the later one speaks for them.
        samples = pushing.samples if sent.payloads else 0
        self._commit(
            pushing.seq,
            pushing.assignment,
            sent,
            samples,
            loss,
            pushing=pushing,
            computing_s=computing_s,
        )
        return bool(sent.payloads)

    def abandon(self, pushing: Pushing) -> None:
        """Give up a step; the ledger is as it was before."""
        self._pushes.making = None
        self._connection.abandon(pushing.seq)

    def skip(self, assignment: m.Assignment) -> None:
        """Answer without a gradient, and without samples that would count."""
        self.seq += 1
        self._commit(self.seq, assignment, Compressed(), 0, 0.0)

    def confirm(self, assignment: m.Assignment, samples: int, loss: float, exchanged: m.Exchanged) -> None:
        """Say that the gradients have been exchanged as coded packets."""
        self.seq += 1
        self._commit(self.seq, assignment, Compressed(), samples, loss, exchanged=exchanged)

    def evaluated(self, epoch: int) -> AbstractContextManager[None]:
        """In it the model is the one that the server has at this version: with the job's buffers."""
        return self._state.evaluated(epoch)

    def report(self, evaluation: m.Evaluation) -> None:
        """Report an evaluation; it is sent again after a reconnect."""
        self._connection.report(evaluation)

    def profile(self, times: StepTimes, pushing: Pushing) -> None:
        """Send what was measured of the last steps, when that is due. pushing: the last push."""
        if times.due and not pushing.assignment.parts:
            densities = self._compression.compressor.sent_shares(pushing.assignment.progress)
            self._connection.profile(times.profile(densities, pushing.sent_bytes))

    def leave(self) -> None:
        """Make the next push the last, and whole, so that nothing is lost that is in the ledger."""
        self.leaving = True

    # ---- the narrow door of coded packets

    def handle_packets(self, handler: PacketHandler) -> None:
        """Register the handler of packets and snapshot requests."""
        self._packets = handler

    def send_packet(self, header: m.Packet, words: npt.NDArray[np.uint32]) -> None:
        """Send a coded packet. If the stream breaks it is lost: the server has the exchange done anew."""
        self._connection.send(header, [words.view(np.uint8)])
        self._metrics.raw_up.inc(words.nbytes)

    def begun(self, assignment: m.Assignment) -> None:
        """Note that an assignment's exchange has begun: sent again, it asks for nothing."""
        self._answered = assignment.id

    def stepped(self, version: int) -> None:
        """Note that the replica has taken a step of its own."""
        self.replica.version = version
        self._connection.stepped(version)
        self._metrics.version.set(version)

    def send_snapshot(self, *, leaving: bool) -> None:
        """Send the replica: to a server that asks for it, or before leaving, when nobody else may have it."""
        if self.replica.version is None:
            return
        # A copy: the next step may be taken while it is being sent.
        values = [value.copy() for value in self.replica.values()]
        self._connection.send(m.Snapshot(version=self.replica.version, leaving=leaving), values)
        self._metrics.raw_up.inc(self.replica.manifest.raw_bytes)
        if leaving:
            self._connection.flush()

    # ---- inside

    def _released(self) -> m.Assignment | None:
        """The assignment that waits, once the replica is at its version."""
        assignment = self._held
        if assignment is None:
            return None
        if self._packets is not None:
            self._packets.apply(assignment.apply, assignment.version)
        if not assignment.finished:
            if self.replica.version is None or self.replica.version < assignment.version:
                return None
            if self.replica.plan_number < assignment.plan:
                return None
            if self._updates.let_go_if_drifted(assignment):
                return None
            self._at(assignment.version, "told to work at")
            self.saving.begin_work(assignment.version)
            self._updates.count()
            self._metrics.epoch.set(assignment.epoch)
        self.replica.go_back()
        self._held = None
        if self.is_new(assignment):
            self._state.before(assignment)
        return assignment

    def _at(self, version: int, what: str) -> None:
        if version != self.replica.version:
            raise RuntimeError(f"{what} version {version} with a replica of {self.replica.version}")

    def _commit(
        self,
        seq: int,
        assignment: m.Assignment,
        sent: Compressed,
        samples: int,
        loss: float,
        *,
        pushing: Pushing | None = None,
        exchanged: m.Exchanged | None = None,
        computing_s: float = 0.0,
    ) -> None:
        if samples:
            self._state.with_push(seq, assignment.collection)
        checksums = dict[int, int]() if pushing is None else pushing.checksums
        plan = pushing.plan if pushing is not None and checksums else None
        commit = m.Commit(
            seq=seq,
            assignment=assignment.id,
            base_version=assignment.version,
            samples=samples,
            parts=len(checksums),
            digest=digest(checksums),
            loss=loss,
            exchanged=exchanged,
            plan=0 if plan is None else plan.number,
            computing_seconds=computing_s,
        )
        self._pushes.commit(commit, sent, plan)
        self._answered = assignment.id
        self._free.limit()
        self._metrics.loss.set(loss)
        if seq % RESIDUAL_EVERY == 1:
            self._metrics.residual_norm.set(self.held_back)
