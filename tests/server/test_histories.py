"""The promises of every mode, over random histories; `histories` says what is checked after each step."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from world import World, mode_of

from gradwire.proto.messages import Outcome
from gradwire.server.job.events import Apply
from gradwire.server.job.modes import registry
from gradwire.server.job.modes.division import Division, Sliced, StragglerCoded
from gradwire.server.job.modes.round import Round
from gradwire.server.job.modes.stale import StaleOptions
from gradwire.server.job.roster import Member
from gradwire.server.job.samples import Samples
from gradwire.server.job.state import JobState
from gradwire.server.job.work import AssignedWork
from gradwire.server.shard.making import SteppedStore

from .histories import MODES, run

STORE_APPLY = SteppedStore.apply
STEPS = 10_000  # until what is broken has to be noticed
SHARE = 6_000  # of each setting, 72,000 together; `make soak` takes ten million


@pytest.mark.parametrize("mode", MODES)
def test_random_histories_keep_every_promise(mode: str) -> None:
    steps, applied = run(mode, SHARE, seed=1)
    assert steps >= SHARE
    assert applied > SHARE / 40, "the histories never got going"


def test_every_mode_has_its_histories() -> None:
    told = {mode_of(mode).partition(":")[0] for mode in MODES}
    assert told | {"coded"} == registry.MODES.keys()  # coded mode has some of its own


class Histories(RuleBasedStateMachine):
    """The same, with steps that hypothesis chooses and shrinks."""

    world: World

    @initialize(mode=st.sampled_from(sorted(MODES)), data=st.data())
    def begin(self, mode: str, data: st.DataObject) -> None:
        self.world = World(lambda below: data.draw(st.integers(0, below - 1)), epochs=2, **MODES[mode])
        self.world.come()

    @rule()
    def a_worker_comes(self) -> None:
        self.world.come()

    @rule()
    def a_worker_crashes(self) -> None:
        self.world.crash()

    @rule()
    def a_worker_leaves(self) -> None:
        self.world.leave()

    @rule()
    def a_stream_breaks(self) -> None:
        self.world.break_stream()

    @rule()
    def a_worker_reconnects(self) -> None:
        self.world.reconnect()

    @rule()
    def a_worker_computes(self) -> None:
        self.world.compute()

    @rule()
    def messages_arrive(self) -> None:
        self.world.deliver()

    @rule()
    def a_copy_arrives(self) -> None:
        self.world.repeat()

    @rule()
    def a_part_is_damaged(self) -> None:
        self.world.damage()

    @rule()
    def a_part_is_scanned(self) -> None:
        self.world.scanned()

    @rule()
    def nonsense_arrives(self) -> None:
        self.world.push_nonsense()

    @rule()
    def a_version_is_published(self) -> None:
        self.world.publish()

    @rule()
    def an_evaluation_arrives(self) -> None:
        self.world.evaluate()

    @rule()
    def heartbeats_arrive(self) -> None:
        self.world.beat()

    @rule()
    def time_passes(self) -> None:
        self.world.wait()

    @rule()
    def the_clock_jumps(self) -> None:
        self.world.jump()

    def teardown(self) -> None:
        """However it stands, the job comes to its end once the faults stop."""
        if hasattr(self, "world"):
            self.world.pick = random.Random(1).randrange
            self.world.finish()


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    max_examples=100,
    stateful_step_count=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.large_base_example],
)


# ---- what they notice. Each of these takes away one of the things that keep a promise.


def forget(self: Member, outcome: Outcome) -> None:
    """No outcome is remembered."""


def forget_outcomes(self: Member, outcome: Outcome) -> None:
    """Only the number of the last push is."""
    self.last_seq = outcome.seq


def drift_further(self: StaleOptions) -> int:
    """The bound is not the one that was asked for."""
    return self.bound + 1


def wait_for_nobody(self: Round) -> bool:
    """A round closes with its first push."""
    return bool(self.contributions)


def never_evaluate(self: JobState) -> int:
    return 0


def weigh_nothing(self: SteppedStore, order: Apply, pushes: Any, send: Any) -> Any:
    return STORE_APPLY(self, dataclasses.replace(order, weight=0.5 * order.weight), pushes, send)


def give_nothing_back(self: Samples, drawn: Any, *, settled: bool = False) -> None:
    if not settled:
        self.settle(drawn)


def nothing_is_vacant(self: Division, answered: Any, lost: Any, open_: int) -> list[int]:
    """A lost member's slice is left out."""
    return []


def weigh_alike(self: StragglerCoded, answered: Any) -> dict[int, float]:
    """Pushes are added up, and not decoded."""
    return {place: 1 / len(answered) for place, samples in answered.items() if samples}


@pytest.mark.parametrize(
    ("mode", "owner", "name", "broken"),
    [
        ("sync", Member, "remember", forget),
        ("async:rate=inverse", Member, "remember", forget),
        ("sync", Member, "remember", forget_outcomes),
        ("stale:bound=2", StaleOptions, "staleness_bound", property(drift_further)),
        ("async:rate=inverse", Samples, "give_back", give_nothing_back),
        ("sync", Round, "complete", property(wait_for_nobody)),
        ("stale:bound=2", SteppedStore, "apply", weigh_nothing),
        ("sync", JobState, "evaluation_due", property(never_evaluate)),
        ("sync", Samples, "give_back", give_nothing_back),
        ("sync:redundancy=2", Sliced, "vacant", nothing_is_vacant),
        ("sync:redundancy=2", Samples, "give_back", give_nothing_back),
        ("sync:stragglers=1", StragglerCoded, "weights", weigh_alike),
        ("sync:stragglers=1", StragglerCoded, "portions", Division.portions),
    ],
)
def test_the_histories_notice_what_is_broken(
    monkeypatch: pytest.MonkeyPatch, mode: str, owner: type[Any], name: str, broken: Any
) -> None:
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises(AssertionError, match=r"mode .* seed"):
        run(mode, STEPS, seed=1)


def test_the_histories_notice_a_push_that_answers_two_assignments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the number of its assignment a late push would count for whatever its worker has now."""

    class Anything(int):
        def __ne__(self, other: object) -> bool:
            return False

        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    original = AssignedWork.__init__

    def build(self: AssignedWork, **fields: Any) -> None:
        assignment = fields["assignment"]
        object.__setattr__(assignment, "id", Anything(assignment.id))
        original(self, **fields)

    monkeypatch.setattr(AssignedWork, "__init__", build)
    with pytest.raises(AssertionError, match=r"mode .* seed"):
        run("async:rate=inverse", STEPS, seed=1)
