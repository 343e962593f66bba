"""The oracle of the random histories: what it notes of a job, and what it checks after every step.

`histories` has the list of promises, whose letters stand in the messages here.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from pushes import held
from simulated import (
    DIVIDED,
    ELEMENTS,
    RATE,
    Sim,
    coefficients,
    elements_of,
    label,
    parts_of,
    replica,
    samples_of,
    values,
)
from stepping import core_of, state

from gradwire.common.parts import Plan
from gradwire.compressors import Payload
from gradwire.proto.manifest import Manifest
from gradwire.proto.messages import Assignment, Outcome, Range
from gradwire.proto.refusal import Reason
from gradwire.server.conductor import Conductor
from gradwire.server.job import events as e
from gradwire.server.job.modes.arrivals import Arrivals
from gradwire.server.job.modes.local_rounds import LocalRounds
from gradwire.server.job.modes.registry import parse
from gradwire.server.job.modes.round import RoundLife
from gradwire.server.job.modes.rounds import Rounds
from gradwire.server.job.modes.stale import StaleOptions
from gradwire.server.job.work import AssignedWork
from gradwire.server.shard.local import LocalShard
from gradwire.server.shard.making import SteppedStore
from gradwire.server.shard.mean import Push, Share
from gradwire.server.shard.store import Encoded, Float32
from gradwire.server.streams.outbox import WorkerStream
from gradwire.server.streams.push_record import PushLife

LEASE_S = 10.0


class Local(LocalShard):
    """One without a thread, whose store the world has."""

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle

        def build(manifest: Manifest, given: Sequence[Float32], plan: Plan) -> SteppedStore:
            raise AssertionError("the world makes the store, and `hold` takes it")

        super().__init__(build)

    def hold(self, store: SteppedStore) -> None:
        self._store = store
        self.reported.manifest, self.reported.plan = store.manifest, store.plan

    def close_round(self) -> None:
        """Like the beginning of `apply`."""
        self._close_round()

    @staticmethod
    def _on_loop(send: Any) -> Any:
        return send

    def _submit(self, function: Callable[..., None], *arguments: Any) -> None:
        if function.__name__ == "add":
            self._oracle.check_final(*arguments[:2])
        function(*arguments)

    def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        function(*arguments)

    def put(
        self,
        key: e.PushKey,
        part: int,
        payloads: Sequence[Payload],
        assignment: int = 0,
        learning_rates: Sequence[float] = (),
    ) -> None:
        self._oracle.storing(key, part, assignment, payloads)
        super().put(key, part, payloads, assignment, learning_rates)
        self._oracle.check_prompt()

    def drop(self, key: Any) -> None:
        self._oracle.forgetting(key)
        super().drop(key)


class Oracle:
    """Oracle of one job. The world that has it makes things happen, and tells it."""

    server: Conductor
    shard: Local

    def __init__(self, mode: str, *, epochs: int, samples: int, batch: int, **rules: Any) -> None:
        self.core = core_of(mode, batch_size=batch, epochs=epochs, lease_seconds=LEASE_S, **rules)
        self.given_mode, self.rules = mode, self.core.state.rules
        options = parse(mode)
        # In clocks, as it was asked for: what the mode makes of it is what is tested.
        self.bound = options.bound if isinstance(options, StaleOptions) else None
        self.now: float = 0.0
        self.samples, self.epochs = samples, epochs
        self.sims: dict[str, Sim] = {}
        self.pending: tuple[e.Apply, list[Push]] | None = None
        self.outcomes: dict[tuple[str, int, int], Outcome] = {}
        self.accepted: dict[str, int] = {}  # label -> version that was named
        self.applied: dict[str, int] = {}
        self.covered: Counter[tuple[int, int]] = Counter()  # (epoch, sample) in accepted pushes
        self.answered: Counter[tuple[int, int]] = Counter()  # in those that were decided on at all
        self.ranges: dict[int, list[tuple[int, int]]] = {}  # by assignment
        self.assignments: dict[int, Assignment] = {}
        self.elements: Counter[tuple[tuple[int, int], int]] = (
            Counter()
        )  # (sample, element) in what is applied
        self.excused: set[tuple[int, int]] = set()  # nothing came of their step, or it is in a residual
        self.pushes: dict[str, e.Pushed] = {}
        self.given: dict[int, set[str]] = {}  # by version, who was given samples and has not been lost since
        self.gone: set[tuple[int, str]] = set()  # (version, worker) of those that have
        self.late: set[tuple[int, int]] = set()
        self.decided = 0
        self.rated = 0  # pushes of which a part was stored, whose learning rates control has noted
        self.hints = 0  # that a push is unwanted
        self.newest_clock = -1
        self.steps = 0
        self.store: SteppedStore | None = None
        self.plan = DIVIDED  # in force
        self.plans = {DIVIDED.number: DIVIDED}  # that have been
        self.divided_as: dict[str, Plan] = {}  # by push of which parts count
        self.expected = np.zeros(ELEMENTS, np.float32)
        # Of rounds that are stepped in parts. The one that is open, or the last: members by assignment, those
        # that are waited for, what they have stored by part, and what is stepped of it.
        self.in_parts = self.rules.overlap == "both"
        self.members: dict[int, tuple[str, int, int]] = {}
        self.waited: set[int] = set()
        self.vacant: set[int] = set()  # of these, for whom everything waits
        self.succeeded: set[int] = set()  # assignments whose place somebody else was given, of all rounds
        self.of_part: Counter[tuple[int, tuple[int, int]]] = Counter()  # (part, sample) in what counts
        self.counted_as: dict[tuple[int, int], Plan] = {}  # of samples that count, the plan
        self.has: defaultdict[int, dict[int, e.PushKey]] = defaultdict(dict)
        self.holds: dict[tuple[e.PushKey, int], bool] = {}  # by part: whether it has any values
        self.final: dict[int, list[tuple[str, int]]] = {}
        self.sent: list[Encoded] = []
        self.following: list[tuple[Sim, WorkerStream | None]] = []
        self.begun = 0  # rounds, and whether this one has while it was open
        self.begun_open = False
        self.counts: defaultdict[str, dict[int, int]] = defaultdict(dict)  # version, by push and part
        self.assignment_of: dict[str, int] = {}  # of those
        self.told_stale: set[str] = set()
        self.given_up: set[tuple[int, int]] = set()  # samples of members lost in rounds that had begun
        self.applied_parts: dict[str, dict[int, bool]] = {}  # which are not empty
        self.replica = replica() if self.in_parts else None
        self.opened: tuple[int, list[tuple[str, int]]] = (-1, [])  # version and members of the last
        self.most_samples = 0  # of a member in the last round
        self.expected_ranges: list[tuple[Range, ...]] = []  # by place, of the round after that
        self.came_as_expected = 0
        self.carried: set[tuple[int, int]] = set()  # of steps that an epoch's end cut short
        self.ended: set[int] = set()  # assignments of those

    def decide(self, event: e.Event[Any]) -> e.Result[Any]:
        """Return control's reply and actions. Raises Refused."""
        push = event if isinstance(event, e.Pushed) else None
        accepted = self.core.state.accepted_pushes
        before = accepted + self.core.state.stale_pushes
        member = self.core.state.roster.members.get(push.worker) if push else None
        clock = member.clock if member is not None else None
        self.steps += 1
        works = self.works() if self.core.state.rules.script else []
        result = self.core.step(event, self.now)
        for work, worker in works:
            if work.assignment.exhausted and not work.stepped and work.id not in self.ended:
                self.note_ended(work, worker)
        if isinstance(event, e.ApplyStarted):
            self.check_begun(event)
        self.rated += isinstance(event, e.RatesReceived)
        if push is not None and self.core.state.accepted_pushes + self.core.state.stale_pushes > before:
            self.decided += 1
            self.pushes[label(push.key)] = push
            samples = self.covered_by(push)
            self.answered.update(samples)
            answer: Outcome = result.reply.outcome
            redundant = answer.refusal is not None and answer.refusal.reason is Reason.REDUNDANT
            if not redundant and (answer.refusal is not None or not push.samples):
                self.excused.update(samples)
            if self.core.state.accepted_pushes > accepted:
                name = label(push.key)
                assert name not in self.accepted, f"E: {name} was accepted twice"
                self.accepted[name] = answer.version
                if not self.core.mode.shares_samples:
                    self.covered.update(samples)
                bound = self.bound
                if clock is not None and bound is not None:
                    behind = self.newest_clock - clock
                    assert behind <= bound, f"S: {name} is {behind} clocks behind"
                    self.newest_clock = max(self.newest_clock, clock)
        if push is not None:
            identity = (push.worker, push.incarnation, push.seq)
            first = self.outcomes.setdefault(identity, result.reply.outcome)
            assert result.reply.outcome == first, f"E: a duplicate of {identity} got another outcome"
        return result

    def works(self) -> list[tuple[AssignedWork, str]]:
        roster = self.core.state.roster
        members = [*roster.members.values(), *roster.departed.values()]
        return [(each.work, each.worker) for each in members if each.work is not None]

    def note_ended(self, work: AssignedWork, worker: str) -> None:
        """G: work has ended without a push, and its gradients go into its worker's next step."""
        self.ended.add(work.id)
        for sample in samples_of(work.assignment):
            again = sample in self.carried and not self.core.mode.shares_samples
            assert not again, f"G: {sample} is settled twice"
            self.carried.add(sample)
        self.given.get(work.assignment.version, set()).discard(worker)

    def covered_by(self, push: e.Pushed) -> list[tuple[int, int]]:
        """Return the samples that a push stands for."""
        samples = self.ranges.get(push.assignment, [])
        if not push.batches:
            return samples
        batches = self.assignments[push.assignment].batches
        return samples[: sum(batches[: push.batches])] if batches else samples

    def adopt(self, action: e.Adopt) -> None:
        """A new plan is in force."""
        assert (action.plan, action.version) == (self.plan.number + 1, self.core.state.version), "D"
        assert self.pending is None, "D: something is being applied"
        assert self.accepted.keys() == self.applied.keys(), "D: what was accepted is of the old plan"
        assert not self.sent, "D: parts of a round that is open have gone out"
        self.server._adopt(action)  # pyright: ignore[reportPrivateUsage]
        assert not held(self.server.ledger), "D: parts of the old plan are left"
        self.plan = self.plans[action.plan] = self.shard.reported.plan
        self.waited.clear()
        self.following.clear()
        self.has.clear()
        if self.replica is not None:
            self.replica.adopt(self.plan)

    # ---- rounds that are stepped in parts

    def open_round(self, action: e.Open) -> None:
        assert action.version == self.core.state.version + 1
        assert self.pending is None
        assert not self.final or (self.store is not None and self.store.version == self.core.state.version)
        self.check_expected()
        self.members, self.waited = dict(action.members), set(action.members)
        self.vacant.clear()
        self.has.clear()
        self.final.clear()
        assert not self.sent, "B: parts of a round that was given up have gone out"
        self.begun_open = False
        listening = {member.worker for member in self.core.state.roster.listening()}
        names = [name for name, _, _ in action.members.values()]
        sims = [self.sims[name] for name in names if name in listening and name in self.sims]
        self.following = [(sim, sim.stream) for sim in sims if sim.ready]
        self.server.final_parts.open_round()
        self.shard.open_round(action, self.sent.append, self.server._final)  # pyright: ignore[reportPrivateUsage]

    def check_expected(self) -> None:
        """If nothing has happened, members are given what they were told to expect. A round in parts may have
        another number of local steps than the last, which the loss decides too late to tell."""
        round_ = self.core.mode.round if isinstance(self.core.mode, Rounds) else None
        assert round_ is not None
        given = [self.assignments.get(slot.work) for slot in round_.slots]
        told = [assignment.next if assignment else () for assignment in given]
        now = (self.core.state.version, [slot.member for slot in round_.slots])
        (version, before), expected = self.opened, self.expected_ranges
        self.opened, self.expected_ranges = now, told
        most, self.most_samples = self.most_samples, round_.division.parts[0].samples
        lost = any((each, worker) in self.gone for each in (version, now[0]) for worker in self.sims)
        lost |= self.in_parts and most != self.most_samples
        if lost or (version + 1, before) != now:
            return
        for part, ranges in zip(round_.division.parts, expected, strict=False):
            if ranges:
                assert part.drawn.ranges == ranges, f"A: {ranges} were expected, not {part.drawn.ranges}"
                self.came_as_expected += 1

    def tell_shard(self, action: e.MemberLost | e.Substitute | e.Exclude) -> None:
        match action:
            case e.MemberLost():
                assert self.waited.issuperset(action.assignments), "B: who has no place cannot lose it"
                self.vacant.update(action.assignments)
                self.shard.change_round(action)
            case e.Substitute():
                self.vacant.discard(action.lost)
                if action.assignment != action.lost:
                    self.replace_member(action)
                missing = set(range(len(self.plan.parts))) - self.final.keys()
                self.server._substitute(action)  # pyright: ignore[reportPrivateUsage]
                asked = self.server.final_parts.asked(action.assignment)
                assert action.assignment == action.lost or set(asked) == missing != set(), f"B: {asked}"
            case e.Exclude():
                for each in action.assignments:
                    self.give_up(each)
                self.shard.change_round(action)
        self.check_prompt()

    def replace_member(self, action: e.Substitute) -> None:
        assert action.lost in self.members, "B: a place is given that nobody had"
        terms = action.worker, action.incarnation, self.members[action.lost][2]
        self.members = {
            (action.assignment if each == action.lost else each): (terms if each == action.lost else old)
            for each, old in self.members.items()
        }
        self.give_up(action.lost)
        self.waited.add(action.assignment)
        self.succeeded.add(action.lost)

    def give_up(self, assignment: int) -> None:
        self.waited.discard(assignment)
        self.vacant.discard(assignment)
        for stored in self.has.values():
            stored.pop(assignment, None)

    def close_round(self, action: e.Apply) -> None:
        """Samples of which nothing more can come; what has gone out early went to those who have it."""
        if not self.in_parts:
            if isinstance(self.core.mode, LocalRounds):
                self.check_expected()
            return
        pushed = {self.pushes[label(each.key)].assignment for each in action.contributions}
        left = self.members.keys() - pushed - self.ended
        if left and len(self.final) < len(self.plan.parts):
            assert not action.members, f"B: {action.members} could have taken the places of {left}"
        if self.begun_open:
            round_ = self.core.mode.round if isinstance(self.core.mode, Rounds) else None
            assert round_ is not None
            for each in left:  # some may never have heard of it
                drawn = round_.division.parts[round_.slot_of[each]].drawn
                ranges = [
                    (drawn.epoch, first.start + i) for first in drawn.ranges for i in range(first.count)
                ]
                self.given_up.update(ranges)
        for sim, stream in self.following:
            if sim.ready and sim.stream is stream and self.sims.get(sim.name) is sim:
                assert sim.name in action.members, (
                    f"B: {sim.name} has a version that control does not know of"
                )
        self.waited.clear()
        self.following.clear()

    def storing(self, key: e.PushKey, part: int, assignment: int, payloads: Sequence[Payload]) -> None:
        self.holds[key, part] = bool(payloads)
        if assignment in self.waited:
            self.has[part].setdefault(assignment, key)

    def forgetting(self, key: Any) -> None:
        for stored in self.has.values():
            for assignment in [each for each, other in stored.items() if other == key]:
                del stored[assignment]

    def check_begun(self, event: e.ApplyStarted) -> None:
        round_ = self.core.mode.round if isinstance(self.core.mode, Rounds) else None
        assert round_ is not None, "B: a round that was given up is stepped"
        assert round_.version + 1 == event.version == self.core.state.version + 1
        self.begun += 1
        self.begun_open |= round_.life is RoundLife.OPEN

    def check_prompt(self) -> None:
        for part, stored in self.has.items():
            complete = bool(self.waited) and not self.vacant and self.waited <= stored.keys()
            assert part in self.final or not complete, f"B: part {part} is not stepped"

    def check_final(self, part: int, shares: Sequence[Share]) -> None:
        """A part is about to be stepped."""
        assert part not in self.final, f"B: part {part} is stepped twice"
        assert not self.vacant, f"B: part {part} does not wait for a lost member's place to be taken"
        stored = self.has[part]
        assert self.waited <= stored.keys(), f"B: part {part} does not wait for everybody"
        given = [(each, stored[each]) for each in self.members if each in self.waited]
        round_ = self.core.mode.round if isinstance(self.core.mode, Rounds) else None
        assert round_ is not None, "B: a round that was given up is stepped"
        for assignment, key in given:
            assert round_.slot_of[assignment] not in round_.lost, f"B: {key} was given up"
            self.count(label(key), part, self.core.state.version + 1, assignment)
        full = [(label(key), self.members[each][2]) for each, key in given if self.holds[key, part]]
        assert [(label(share.key), share.samples) for share, _ in shares] == full, "B: rank order"
        self.final[part] = full

    def count(self, name: str, part: int, version: int, assignment: int) -> None:
        assert part not in self.counts[name], f"B: part {part} of {name} is in two versions"
        assert name not in self.told_stale, f"B: part {part} of {name} counts although it was refused"
        self.counts[name][part] = version
        assert self.divided_as.setdefault(name, self.plan) == self.plan, f"D: {name} is of several plans"
        for sample in self.ranges[assignment]:
            self.of_part[part, sample] += 1
            assert self.of_part[part, sample] == 1, f"B: {sample} counts twice in part {part}"
            counted_as = self.counted_as.setdefault(sample, self.plan)
            assert counted_as == self.plan, f"D: {sample} counts in parts of several plans"
        assert self.assignment_of.setdefault(name, assignment) == assignment

    def complete_parts(self, apply: e.Apply) -> None:
        """Take the parts that were not final from the pushes."""
        for part in range(len(self.plan.parts)):
            if part in self.final:
                continue
            self.final[part] = []
            for each in apply.contributions:
                if each.samples:
                    name = label(each.key)
                    self.count(name, part, apply.version, self.pushes[name].assignment)
                    if self.applied_parts[name][part]:
                        self.final[part].append((name, each.samples))

    def check_counted(self, stream: WorkerStream, outcome: Outcome) -> Outcome:
        """The outcome as control gave it."""
        name = label(e.PushKey(*stream.id, outcome.seq))
        reason = None if outcome.refusal is None else outcome.refusal.reason
        if reason is Reason.STALE or (self.in_parts and reason is Reason.REDUNDANT):
            assert set(outcome.counted) == self.counts[name].keys(), f"B: {name} is told {outcome.counted}"
            self.told_stale.add(name)
            elsewhere = self.in_parts and self.pushes[name].assignment in self.succeeded
            assert elsewhere == (reason is Reason.REDUNDANT and self.in_parts), f"B: {name} is told {reason}"
        else:
            assert not outcome.counted
        return replace(outcome, counted=())

    # ---- what is checked

    def state(self) -> Any:
        return state(self.core)

    def unchanged(self, before: Any) -> None:
        assert before is None or self.state() == before, "N: a refused input changed the state"

    def check_applied(self, apply: e.Apply) -> None:
        """Against a plain mean, in the order of the ranks, every product and sum in float32, and SGD."""
        self.check_members(apply)
        given = [each for each in apply.contributions if each.samples and each.weight != 0]
        gradient = np.zeros(ELEMENTS, np.float32)
        if self.in_parts:
            gradient = self.gradient_of_parts()
        for each in given if not self.in_parts else ():
            total = sum(other.samples for other in given if other.slice == each.slice)
            weight = each.samples / total * apply.weight if each.weight is None else each.weight
            held = elements_of(self.assignments[self.pushes[label(each.key)].assignment], self.plan)
            gradient[held] += np.float32(weight) * values(label(each.key))[held]
        if self.core.mode.shares_samples:
            self.check_shared(given)
        if given or self.in_parts:
            torch.from_numpy(self.expected).add_(torch.from_numpy(gradient), alpha=-RATE * apply.rate_factor)
        for each in apply.contributions:
            name = label(each.key)
            assert name not in self.applied, f"E: {name} was applied twice"
            assert self.accepted.get(name) == apply.version, f"E: {name} is in another version than was said"
            self.applied[name] = apply.version
        assert self.store is not None
        parameters = b"".join(value.tobytes() for value in self.store.values())
        assert parameters == self.expected.tobytes(), "E: the parameters are not those of the log"
        assert np.isfinite(self.expected).all(), "F"

    def gradient_of_parts(self) -> Float32:
        """The mean of each part over those who count in it."""
        gradient = np.zeros(ELEMENTS, np.float32)
        for part, given in self.final.items():
            here = slice(self.plan.parts[part].start, self.plan.parts[part].end)
            total = sum(samples for _, samples in given)
            for name, samples in given:
                gradient[here] += np.float32(samples / total) * values(name)[here]
        return gradient

    def check_shared(self, given: Sequence[e.Contribution]) -> None:
        """C: what each sample's gradient comes to in each slice."""
        for slice in {each.slice for each in given}:
            pushes = [each for each in given if each.slice == slice]
            assigned = {
                label(each.key): self.assignments[self.pushes[label(each.key)].assignment] for each in pushes
            }
            comes_to: defaultdict[tuple[int, int], float] = defaultdict(float)
            total = sum(each.samples for each in pushes)
            for each in pushes:
                assignment = assigned[label(each.key)]
                weight = each.samples / total if each.weight is None else each.weight
                for sample, part in zip(*coefficients(assignment), strict=True):
                    comes_to[sample] += weight * part
            expected = 1 / len(comes_to) if comes_to else 0.0
            for sample, weight in comes_to.items():
                assert abs(weight - expected) < 1e-9, f"C: {sample} weighs {weight}, not {expected}"
            (held,) = {tuple(elements_of(assignment, self.plan)) for assignment in assigned.values()}
            for sample in comes_to:
                for element in held:
                    self.elements[sample, element] += 1
                    assert self.elements[sample, element] == 1, f"C: {sample} is applied twice"

    def check_stored(self) -> None:
        """P: no part is left without owner."""
        ledger = self.server.ledger
        for key in held(ledger):
            waits = label(key) in self.accepted and label(key) not in self.applied
            life = ledger.open(key[:2]).get(key.seq)
            assert waits or life is not None, f"P: {key} is left in the ledger"
            assert life is not PushLife.UNWANTED, f"P: {key} is unwanted, and kept"

    def check_members(self, apply: e.Apply) -> None:
        """In rounds, that it has everybody who was given work for it and is still there, but for backups; by
        arrival, that it weighs what it should."""
        assert apply.rate_factor == 1.0
        if isinstance(self.core.mode, Arrivals):
            (contribution,) = apply.contributions
            push = self.pushes[label(contribution.key)]
            assert apply.base_version == push.base_version
            weight = 1 / max(1, apply.version - 1 - push.base_version) if self.core.mode.inverse else 1.0
            assert apply.weight == weight or self.bound is not None  # where a slow worker's share is less
            return
        assert apply.weight == 1.0
        if self.core.mode.shares_samples:
            return
        names = {label(each.key).split("/")[0] for each in apply.contributions}
        missing = self.given.get(apply.version - 1, set()) - names
        assert isinstance(self.core.mode, Rounds)
        backup = self.core.mode.sharing.backup
        assert len(missing) <= backup, f"version {apply.version} did not wait for {missing}"

    def check_end(self) -> None:
        for name, parts in self.counts.items():
            if name in self.accepted:
                asked = parts_of(self.assignments[self.assignment_of[name]], self.divided_as[name])
                assert parts == dict.fromkeys(asked, self.accepted[name]), f"B: of {name} count {parts}"
        for epoch in range(self.epochs):
            for index in range(self.samples):
                sample = (epoch, index)
                assert self.covered[sample] <= 1, f"{sample} was accepted from two workers"
                answered = self.answered[sample] or sample in self.late | self.given_up | self.carried
                assert answered, f"{sample} was lost"
                parts_of_plan = range(len(self.counted_as.get(sample, self.plan).parts))
                counts = [self.of_part[part, sample] for part in parts_of_plan]
                if self.in_parts and sample not in self.excused | self.late | self.given_up | self.carried:
                    assert counts == [1] * len(counts), f"B: {sample} was lost in parts: {counts}"
                if self.core.mode.shares_samples and sample not in self.excused | self.late | self.carried:
                    found = [self.elements[sample, element] for element in range(ELEMENTS)]
                    assert found == [1] * ELEMENTS, f"C: {sample} was lost: {found}"
        assert set(self.applied) == set(self.accepted), "E: acknowledged, but not applied"
        self.server.forget_gone()
        for key in held(self.server.ledger):  # of a late worker, which may still be sending
            assert key.seq in self.server.ledger.open(key[:2]), f"P: {key} is left in the ledger"
        evaluated = [each.epoch for each in self.core.state.evaluations.done]
        assert evaluated == sorted(set(evaluated))
        assert not self.core.state.roster.members or evaluated[-1] == self.epochs, "the end is evaluated"
