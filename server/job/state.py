"""The state of a job that all modes share: data, and the questions and small changes that follow from it. It
decides nothing: `core` and its mode change it, other files read it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from ...common.spec import Length
from ...common.stored import DERIVED
from ...proto.messages import Assignment, LostStatus, Phase
from ...settings import ServerSettings
from . import limits
from .accumulation import Accumulation
from .buffers import Buffers
from .evaluations import Asked, Evaluations
from .events import Action, Assign
from .roster import Member, Roster
from .same_batches import SameBatches
from .samples import Drawn, Samples
from .schedule import Constant, Passed
from .work import AssignedWork, WorkLife

LOST_REMEMBERED = 256  # number of lost members that the status lists
ACTIVITIES = 16  # most activities whose longest times are recorded: workers choose the names
PUSHES_AFTER_PLAN = 3  # a new plan comes into force only if each member has at least this many pushes left


@dataclass(kw_only=True)
class JobState:
    """The state of one job that its modes share."""

    rules: ServerSettings = field(metadata=DERIVED)
    schedule: Constant = field(metadata=DERIVED)
    evaluate_every: Length = field(metadata=DERIVED)
    same_batches: SameBatches = field(default_factory=SameBatches, metadata=DERIVED)
    roster: Roster
    phase: Phase = Phase.EMPTY
    initializer: tuple[str, int] | None = None  # member that was asked for the initial parameters
    fingerprint: bytes = b""  # fingerprint of the job's model; empty before it has one
    data: int = 0  # checksum of some training samples; 0 if unknown
    samples: Samples = field(default_factory=lambda: Samples(0, 0))
    version: int = 0  # version of the parameters; each step of the optimizer makes the next one
    earlier_steps: int = 0  # steps that the script took before version 0, in a job that ended
    plan: int = 1  # number of the plan in force
    planned: bool = False  # True while the next plan is prepared and waits to come into force
    started_at: float | None = None  # first assignment; from then on, one ready member is enough to train
    assignments: int = 0  # number of assignments so far, which is the id of the last one
    evaluations: Evaluations = field(default_factory=Evaluations)
    accumulation: Accumulation = field(default_factory=Accumulation)
    buffers: Buffers = field(default_factory=Buffers)
    best: float | None = None  # value of the `--keep` metric of the best version; None before the first
    lost: list[LostStatus] = field(default_factory=list[LostStatus])  # the last ones, oldest first
    accepted_pushes: int = 0
    unlogged: bool = False  # True once the log has named a member that does not know its training loss
    stale_pushes: int = 0  # number of pushes refused as stale or redundant
    repeated_samples: int = 0  # number of samples trained on by a lost member, and again by another one
    longest_stalled_s: dict[str, float] = field(default_factory=dict[str, float])  # by activity
    suspensions: int = 0  # number of times that a member was suspended for lack of progress
    elapsed_s: float = 0.0  # seconds since `started_at`, when the limits were last checked
    closing: bool = field(default=False, metadata=DERIVED)  # the server will stop: no more work
    reunion: bool = False  # True from a restart of the server until all members have returned or are lost
    stopped: str = ""  # reason for which the job ends before its last epoch; empty if it does not
    last_evaluation: int = 0  # number of the evaluation of the last version; 0 before the end
    waiting_since: float | None = None  # beginning of the present condition
    reported: tuple[str, float] | None = None  # subject and time of the last report

    @property
    def training(self) -> bool:
        """True from the initial parameters until training is complete."""
        return self.phase in (Phase.GATHERING, Phase.RUNNING)

    def rate_factor(self, progress: float, steps: float, *, part: float = 0.5) -> float:
        """Return the factor of the base learning rate in a step.

        Args:
            progress: epochs trained on when the step is half done, with a fraction.
            steps: steps (`Mode.steps`) that a worker has then taken, with a fraction.
            part: fraction of the next version's work that is then done.
        """
        of_job = limits.fraction_done(self.rules, progress, self.version + part)
        return self.schedule.factor(Passed(epochs=progress, steps=steps, of_job=of_job))

    def why_warmup_is_long(self, total_steps: int) -> str:
        """Return a warning if the schedule's warm-up takes the whole job; empty if it does not.

        Args:
            total_steps: number of steps of the whole job, local steps in local mode; 0 if unknown.
        """
        warmup, rules = self.schedule.warmup, self.rules
        length = {"epochs": rules.epochs, "steps": total_steps, "percent": 100}[warmup.unit]
        if not length or warmup.number < length:
            return ""
        return (
            f"--schedule {rules.schedule}: its warm-up of {warmup.number:g} {warmup.unit} takes the whole "
            f"job, which has {length} {warmup.unit}, and the rate does not stay at --learning-rate "
            f"{rules.learning_rate:g}; use a shorter warm-up"
        )

    @property
    def epoch(self) -> int:
        """Number of complete epochs."""
        return self.samples.completed

    @property
    def done(self) -> bool:
        """True once all samples are settled that the job will train on."""
        return self.samples.done or (bool(self.stopped) and self.samples.settled)

    def may_step(self, ahead: int = 0) -> bool:
        """Return True if one more step may begin.

        Args:
            ahead: number of other steps that are being computed or applied.
        """
        most = self.rules.max_steps
        held = self.stopped or self.closing or self.apart
        return not held and (not most or self.version + ahead < most)

    @property
    def apart(self) -> bool:
        """True while members have yet to return, or be lost, after a restart of the server.

        No work is assigned until then, so that steps are the same as without the restart.
        """
        return self.reunion and not all(member.listening for member in self.roster.members.values())

    def check_limits(self, now: float) -> None:
        """Set `stopped` to the reason if a limit ends the job now. `now` is in seconds of the job's clock."""
        if self.started_at is None or self.stopped:
            return
        self.elapsed_s = now - self.started_at
        self.stopped = limits.why_over(self.rules, self.version, self.elapsed_s, self.evaluations.done)

    @property
    def evaluation_due(self) -> int:
        """Number of the last evaluation that is due; 0 for none. It leaves out the evaluation of the final
        version."""
        return 0 if self.stopped or self.epoch >= limits.epochs(self.rules) else self.evaluations_passed

    @property
    def evaluations_passed(self) -> int:
        """Number of intervals of `--evaluate-every` that have passed; 0 before the first.

        An interval of whole epochs counts complete epochs only.
        """
        every = self.evaluate_every
        whole = every.number.is_integer()
        passed = {
            "epochs": self.epoch if whole else self.samples.progress,
            "steps": self.version,
            "seconds": self.elapsed_s,
        }
        return int(passed[every.unit] / every.number)

    @property
    def epoch_progress(self) -> float:
        """Fraction of the running epoch that is done, 0 to 1."""
        return min(1.0, max(0.0, self.samples.progress - self.epoch))

    @property
    def plan_due(self) -> bool:
        """True while a new plan waits, and all members will have work after it.

        A new plan makes open pushes late, and their gradients return to the residuals, which only later
        pushes send. So enough samples and steps must be left for `PUSHES_AFTER_PLAN` pushes of each member.
        """
        of_push = self.rules.batch_size * self.accumulation.batches
        needed = PUSHES_AFTER_PLAN * of_push * len(self.roster.members)
        most, steps = self.rules.max_steps, self.version + PUSHES_AFTER_PLAN
        return self.planned and self.samples.left >= needed and (not most or steps <= most)

    def work_of(self, worker: str, incarnation: int) -> AssignedWork | None:
        """Return the work of a present member; None if it has none, or is not a member."""
        member = self.roster.present((worker, incarnation))
        return None if member is None else member.work

    def collects(self, worker: str, incarnation: int, collection: int) -> bool:
        """Return True if this worker's present assignment asks for buffers for this collection."""
        work = self.work_of(worker, incarnation)
        return work is not None and work.assignment.collection == collection > 0

    def evaluates(self, worker: str, incarnation: int, epoch: int) -> bool:
        """Return True if this worker was asked for evaluation `epoch` and has not reported it."""
        asked = self.evaluations.asked
        return asked is not None and (asked.by, asked.epoch) == ((worker, incarnation), epoch)

    def unwanted(self, worker: str, incarnation: int, assignment: int) -> bool:
        """Return True if a push for this assignment would be refused as stale or redundant if it were
        committed now.

        Returns:
            False for a worker that is not a member: it may return and get its work back.
        """
        if self.roster.present((worker, incarnation)) is None:
            return False
        work = self.work_of(worker, incarnation)
        return work is None or work.id != assignment or work.late

    def assign(self, member: Member, assignment: Assignment) -> Assign:
        """Give `assignment` the next id, and return the action that sends it to `member`."""
        self.assignments += 1
        return self.send(member, replace(assignment, id=self.assignments, plan=self.plan))

    def assign_samples(
        self,
        member: Member,
        drawn: Drawn,
        now: float,
        *,
        counted: int | None = None,
        share: int = 0,
        **terms: Any,
    ) -> list[Action]:
        """Assign samples to a member at the current version.

        Args:
            counted: number of samples that the push stands for; None for all of `drawn`.
            share: number of samples due to the member, if `drawn` may have fewer.

        Returns:
            The action that sends the assignment; none while the member is reconnecting.
        """
        self.assignments += 1
        left = self.samples.left_of(drawn.epoch)
        if terms.get("total_steps"):
            terms["total_steps"] += self.earlier_steps
        soon = self._evaluation_after(drawn.count)
        collection, take = self.buffers.ask(member, drawn, left, self.roster, soon)
        assignment = Assignment(
            id=self.assignments,
            collection=collection,
            take_buffers=take,
            version=self.version,
            epoch=drawn.epoch,
            ranges=drawn.ranges,
            plan=self.plan,
            earlier_steps=self.earlier_steps,
            **terms,
        )
        work = AssignedWork(assignment=assignment, drawn=drawn, given_at=now, counted=counted, share=share)
        self.roster.assign(member, work)
        self.note_stall(member)
        member.activity, member.stalled_s = "", 0.0
        return [self.send(member, assignment)] if member.listening else []

    def revoke(self, member: Member, *, requeue: bool = True) -> None:
        """Take a member's work from it. It gets the work back if it returns in time, unless others share
        it."""
        work = self.roster.relieve(member)
        if work is None:
            return
        if requeue:
            self.samples.give_back(work.drawn, settled=work.late)
        if not work.shared:
            work.become(WorkLife.REVOKED)
            member.revoked = work

    def requeue_rest(
        self, drawn: Drawn, batches: tuple[int, ...], took: int, *, settled: bool = False
    ) -> Drawn:
        """Requeue the samples of batches that a push does not stand for; return the others.

        Args:
            took: number of batches, from the first, that the push stands for.
        """
        if took >= len(batches) or not self.training:
            return drawn
        count = sum(batches[:took])
        self.samples.give_back(drawn.part(count, drawn.count), settled=settled)
        return drawn.part(0, count)

    def extend(
        self, member: Member, work: AssignedWork, more: Drawn, batches: tuple[int, ...], **terms: Any
    ) -> list[Action]:
        """Add further batches to a member's work.

        Returns:
            The action that sends the assignment again; none while the member is reconnecting.
        """
        work.extend(more, batches, **terms)
        if not work.assignment.collection and not member.newcomer:  # it may be the last of the epoch now
            left, soon = self.samples.left_of(more.epoch), self._evaluation_after(work.drawn.count)
            collection, _ = self.buffers.ask(member, work.drawn, left, self.roster, soon)
            work.assignment = replace(work.assignment, collection=collection)
        return [self.send(member, work.assignment)] if member.listening else []

    def exhaust(self, member: Member, work: AssignedWork) -> list[Action]:
        """Tell a member that asks for further batches of its work that the epoch has none."""
        work.asked = 0
        work.assignment = replace(work.assignment, exhausted=True)
        return [self.send(member, work.assignment)] if member.listening else []

    def note_stall(self, member: Member) -> None:
        """Record the time without progress that a member has recovered from, for the limits of all
        members."""
        longest = self.longest_stalled_s
        if not member.first and (member.activity in longest or len(longest) < ACTIVITIES):
            longest[member.activity] = max(longest.get(member.activity, 0.0), member.stalled_s)

    def _evaluation_after(self, samples: int) -> int:
        """Return the number of the evaluation that becomes due once every member has pushed for `samples`
        samples.

        Returns:
            0 if none becomes due, or if it becomes due with the end of an epoch.
        """
        members = self.roster.ready_members
        steps, every = self.version + members, self.evaluate_every
        if every.unit == "seconds" or self.rules.max_seconds:
            self.buffers.passed(self.elapsed_s)
        progress = self.samples.progress + samples * members / self.samples.per_epoch
        whole = every.number.is_integer()
        passed = {"steps": steps, "epochs": 0 if whole else progress}.get(every.unit, 0) / every.number
        before, most = self.evaluations_passed, self.rules.max_steps
        return before + 1 if int(passed) > before or (most and steps >= most) else 0

    def send(self, member: Member, assignment: Assignment) -> Assign:
        """Return the action that sends `assignment` to `member`, and record that the replica will be at its
        version.
        """
        has, member.version = member.version, assignment.version
        return Assign(worker=member.worker, assignment=assignment, has=has)

    def total_steps(self, taken: int, at_once: int, *, of_version: int = 1) -> int:
        """Return the number of steps that the job will have taken at its end; 0 if only time ends it.

        Args:
            taken: steps so far, including those that are assigned now.
            at_once: number of samples in each batch of a later step, of all members together.
            of_version: number of steps that make one version.
        """
        most = self.rules.max_steps and taken + (self.rules.max_steps - self.version - 1) * of_version
        if not self.rules.epochs:
            return most
        total = taken + self.samples.draws(at_once * self.accumulation.batches)
        return min(total, most) if most else total

    def ask_for_evaluation(self, member: Member, epoch: int, assignment: int, now: float) -> bool:
        """Ask a member for an evaluation, unless it is done or another one is running.

        Returns:
            True if the member was asked.
        """
        if not self.evaluations.wants(epoch):
            return False
        self.evaluations.asked = Asked(
            by=member.id,
            epoch=epoch,
            version=self.version,
            asked_at=now,
            assignment=assignment,
            progress=self.samples.progress,
        )
        return True

    def waited(self, now: float) -> str:
        """Return the seconds that the job has been waiting, as a text with the unit."""
        return f"{0.0 if self.waiting_since is None else now - self.waiting_since:.1f} s"

    def wait_from(self, now: float) -> None:
        """Restart the wait timer at `now`."""
        self.waiting_since, self.reported = now, None
