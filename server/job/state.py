"""The state of a job that all modes share. Plain data: `core` and the modes change it, others read it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from ...common.spec import Length
from ...common.stored import DERIVED
from ...proto.messages import Assignment, LostStatus, Phase
from ...settings import ServerSettings
from . import limits
from .buffers import Buffers
from .evaluations import Asked, Evaluations
from .events import Action, Assign
from .roster import AssignedWork, Member, Roster
from .samples import Drawn, Samples
from .schedule import Constant, Passed

LOST_REMEMBERED = 256
ACTIVITIES = 16  # whose longest times are remembered; workers name them
PUSHES_AFTER_PLAN = 3  # that each member has left, or a new plan does not come into force


@dataclass(kw_only=True)
class JobState:
    """One job. All fields are saved but the rules and what is parsed from them."""

    rules: ServerSettings = field(metadata=DERIVED)
    schedule: Constant = field(metadata=DERIVED)
    evaluate_every: Length = field(metadata=DERIVED)
    roster: Roster
    phase: Phase = Phase.EMPTY
    initializer: tuple[str, int] | None = None  # (worker, incarnation) that was asked for the parameters
    fingerprint: bytes = b""
    data: int = 0  # checksum of some training samples
    samples: Samples = field(default_factory=lambda: Samples(0, 0))  # none before `Initialized`
    version: int = 0
    earlier_steps: int = 0  # taken by the scripts before version 0, in a job that ended
    plan: int = 1  # number of the plan in force
    planned: bool = False  # whether the next plan waits
    started_at: float | None = None  # when work was first assigned; from then on one member is enough
    assignments: int = 0  # so far; the id of the last one
    evaluations: Evaluations = field(default_factory=Evaluations)
    buffers: Buffers = field(default_factory=Buffers)
    best: float | None = None  # value of the metric by which the best version is kept
    lost: list[LostStatus] = field(default_factory=list[LostStatus])  # the last ones
    accepted_pushes: int = 0
    stale_pushes: int = 0
    repeated_samples: int = 0  # trained on by a lost member and again by another one
    local_steps: int = 1  # of the last round
    all_local_steps: int = 0  # of all applied rounds
    applied: int = 0  # coded mode: number of the exchange that made the version
    uncoded_exchanges: int = 0  # that replaced a broken one
    last_redundancy: int = 0  # of the last round of coded mode
    longest_stalled_s: dict[str, float] = field(default_factory=dict[str, float])  # by activity
    suspensions: int = 0  # of members without progress
    clipped: int = 0  # elements of gradients in coded mode, by all workers
    drifting: int = 0  # members whose replicas differ from the first one's
    largest_staleness: int = 0  # of accepted pushes: in clocks in stale mode, else in versions
    elapsed_s: float = 0.0  # since `started_at`
    closing: bool = field(default=False, metadata=DERIVED)  # assign nothing more: the server will stop
    reunion: bool = False  # the server has restarted, and not all members have returned since
    stopped: str = ""  # why the job ends before its last epoch; empty while it does not
    last_evaluation: int = 0  # number of the evaluation of the last version
    waiting_since: float | None = None
    reported: tuple[str, float] | None = None  # subject of the last report about waiting, and its time

    def rate_factor(self, progress: float) -> float:
        """Return the factor of the base learning rate in the next step. progress: epochs so far."""
        steps = self.version + 0.5
        of_job = limits.of_job(self.rules, progress, steps)
        return self.schedule.factor(Passed(epochs=progress, steps=steps, of_job=of_job))

    @property
    def learning_rate(self) -> float:
        """The rate of the next step; 0 where scripts choose it."""
        if self.rules.script:
            return 0.0
        return self.rules.learning_rate * self.rate_factor(self.samples.progress)

    @property
    def epoch(self) -> int:
        """Epochs completed."""
        return self.samples.completed

    @property
    def done(self) -> bool:
        """Whether all samples are settled that the job will train on."""
        return self.samples.done or (bool(self.stopped) and self.samples.settled)

    def may_step(self, ahead: int = 0) -> bool:
        """Return whether one more step may begin, while `ahead` others are being computed or applied."""
        most = self.rules.max_steps
        held = self.stopped or self.closing or self.apart
        return not held and (not most or self.version + ahead < most)

    @property
    def apart(self) -> bool:
        """Whether members have yet to return, or be lost, after a restart of the server. No work is assigned
        until then, so that steps are the same as without the restart."""
        return self.reunion and not all(member.listening for member in self.roster.members.values())

    def check_limits(self, now: float) -> None:
        """Set `stopped` if the job ends before its last epoch."""
        if self.started_at is None or self.stopped:
            return
        self.elapsed_s = now - self.started_at
        self.stopped = limits.why_over(self.rules, self.version, self.elapsed_s, self.evaluations.done)

    @property
    def evaluation_due(self) -> int:
        """Number of the last evaluation that is due, 0 for none; that of the last version does not count."""
        return 0 if self.stopped or self.epoch >= limits.epochs(self.rules) else self.evaluations_passed

    @property
    def evaluations_passed(self) -> int:
        """Number of the last evaluation that became due; by epochs, that of the last complete epoch."""
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
        """Fraction of the running epoch that is done."""
        return min(1.0, max(0.0, self.samples.progress - self.epoch))

    @property
    def plan_due(self) -> bool:
        """Whether a new plan waits, and all members will have work after it. Otherwise their residuals, which
        keep the pushes that the plan makes late, would not be sent."""
        needed = PUSHES_AFTER_PLAN * self.rules.batch_size * len(self.roster.members)
        most, steps = self.rules.max_steps, self.version + PUSHES_AFTER_PLAN
        return self.planned and self.samples.left >= needed and (not most or steps <= most)

    def assign(self, member: Member, assignment: Assignment) -> Assign:
        """Give the assignment the next id, and send it."""
        self.assignments += 1
        return self.send(member, replace(assignment, id=self.assignments, plan=self.plan))

    def give(
        self,
        member: Member,
        drawn: Drawn,
        now: float,
        *,
        counted: int | None = None,
        share: int = 0,
        **terms: Any,
    ) -> list[Action]:
        """Give a member work at the current version. One that is reconnecting is sent it when it is back.

        counted, share: as in `AssignedWork`. terms: the other fields of the assignment.
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
        self.roster.give(member, work)
        self.note_stall(member)
        member.activity, member.stalled_s = "", 0.0
        return [self.send(member, assignment)] if member.listening else []

    def note_stall(self, member: Member) -> None:
        """Remember the time that a member's last activity took, for the limit of the others."""
        longest = self.longest_stalled_s
        if not member.first and (member.activity in longest or len(longest) < ACTIVITIES):
            longest[member.activity] = max(longest.get(member.activity, 0.0), member.stalled_s)

    def _evaluation_after(self, samples: int) -> int:
        """Return the evaluation that becomes due once every member has pushed for so many samples; 0 if none
        does, or if it becomes due with the end of an epoch."""
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
        """Send an assignment that has its id. When it arrives, the member's replica is at its version."""
        has, member.version = member.version, assignment.version
        return Assign(worker=member.worker, assignment=assignment, has=has)

    def total_steps(self, taken: int, at_once: int, *, of_version: int = 1) -> int:
        """Return the number of steps at the job's end; 0 if only time ends it.

        Args:
            taken: steps so far, including those that are assigned now.
            at_once: samples of each later step, of all members together.
            of_version: steps that make one version.
        """
        most = self.rules.max_steps and taken + (self.rules.max_steps - self.version - 1) * of_version
        if not self.rules.epochs:
            return most
        total = taken + self.samples.draws(at_once)
        return min(total, most) if most else total

    def ask_for_evaluation(self, member: Member, epoch: int, assignment: int, now: float) -> bool:
        """Ask a member for an evaluation with this assignment, unless it is done or asked for. Return whether
        the member was asked."""
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
        """Return the time that the job has been waiting, in words."""
        return f"since {0.0 if self.waiting_since is None else now - self.waiting_since:.1f} s"

    def wait_from(self, now: float) -> None:
        """Restart the wait timer at `now`."""
        self.waiting_since = now
