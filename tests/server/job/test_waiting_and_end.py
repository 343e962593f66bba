"""Whom a round waits for, evaluations, and the end of a job."""

from __future__ import annotations

import pytest
from jobs import Job
from stepping import core_of, state

from gradwire.proto.messages import EpochStatus, Phase
from gradwire.proto.refusal import Reason
from gradwire.server.job import events as e
from gradwire.server.job.evaluations import Asked, Evaluations

# ---- saying whom it waits for


def test_what_a_worker_said_before_it_was_given_work_is_not_said_of_it() -> None:
    job = Job(2)
    for _ in range(2):
        for worker in ("w0", "w1"):
            job.step(e.KeepAlive(worker=worker, incarnation=1, activity="waiting"))
        job.push("w0")
        job.push("w1")
        job.publish()
    job.push("w0")
    job.tick(2.5)
    text = job.one(e.Report).text
    assert "w1, connected" in text
    assert "waiting)" not in text


def test_a_round_names_whom_it_waits_for_within_two_seconds() -> None:
    job = Job(3)
    job.push("w1")
    job.step(e.KeepAlive(worker="w2", incarnation=1, activity="computing"))
    reports: list[list[e.Report]] = []
    for _ in range(8):
        job.tick(0.25)
        reports.append(job.all(e.Report))
    first = next(report for found in reports for report in found)
    assert first.ranks == (0, 2)
    assert first.seconds <= 2
    assert "rank 0 (w0" in first.text
    assert "rank 2 (w2, connected, heard" in first.text
    assert "computing" in first.text


def test_a_round_that_takes_long_to_apply_is_said() -> None:
    job = Job(1)
    job.push("w0")
    job.heartbeat("w0")
    job.tick(5)
    assert not job.all(e.Report)
    job.heartbeat("w0")
    job.tick(5.5)
    assert "version 1 is being computed (10.5 s so far)" in job.one(e.Report).text


def test_a_new_reason_to_wait_is_said_within_two_seconds_of_its_beginning() -> None:
    job = Job(2, epochs=1, samples=8)
    job.push("w1")
    job.tick(1.5)
    assert job.one(e.Report).ranks == (0,)
    job.push("w0")
    job.publish()
    job.tick(1.5)
    assert "w0) to evaluate the last version" in job.one(e.Report).text
    job.step(e.Detached(worker="w0", incarnation=1))
    job.step(e.Left(worker="w0", incarnation=1, failed=True, reason="x"))
    job.step(e.Detached(worker="w1", incarnation=1))
    job.tick(1.5)
    assert "to evaluate the last version" in job.one(e.Report).text


def test_it_is_said_again_when_it_changes_and_every_ten_seconds() -> None:
    job = Job(3)
    job.tick(1.5)
    assert len(job.all(e.Report)) == 1
    job.tick(1)
    assert not job.all(e.Report)
    job.push("w1")
    job.tick(0.25)
    assert job.one(e.Report).ranks == (0, 2)
    said = 0
    for _ in range(84):
        job.heartbeat("w0", "w2")
        job.tick(0.25)
        said += len(job.all(e.Report))
    assert said == 2


def test_a_healthy_start_is_told_with_its_reason_and_is_no_warning() -> None:
    job = Job(min_workers=2)
    job.tick(0)
    job.tick(1.5)
    assert "for a first worker" in job.one(e.Report).text
    assert job.one(e.Report).usual
    for worker in ("w0", "w1"):
        job.join(worker)
        job.attach(worker)
        job.step(e.KeepAlive(worker=worker, incarnation=1, activity="compiling kernels"))
    job.ready("w0")
    job.tick(1.5)
    assert "rank 0 (w0, compiling kernels) to upload the initial parameters" in job.one(e.Report).text
    assert job.one(e.Report).usual
    job.initialize("w0")
    job.tick(1.5)
    assert "have 1 of 2 (rank 0 (w0)); rank 1 (w1, compiling kernels) is loading" in job.one(e.Report).text
    assert job.one(e.Report).usual
    job.ready("w1")
    job.tick(1.5)
    assert job.one(e.Report).text.startswith("version 1 has waited 1.5 s for rank 0")
    assert job.one(e.Report).usual
    for worker in ("w0", "w1"):
        job.step(e.KeepAlive(worker=worker, incarnation=1, activity="compiling kernels"))
    job.tick(10)
    expected = "version 1 has waited 11.5 s for members that are compiling kernels: rank 0 (w0, connected"
    assert job.one(e.Report).text.startswith(expected)


def test_a_wait_is_a_warning_once_a_member_is_away_or_has_made_a_step() -> None:
    away = Job(2)
    away.step(e.Detached(worker="w0", incarnation=1))
    away.tick(1.5)
    late = Job(2)
    late.round(["w0", "w1"])
    late.push("w0")
    late.tick(1.5)
    assert not away.one(e.Report).usual
    assert not late.one(e.Report).usual


# ---- the end


def test_who_gets_ready_when_the_job_is_over_may_go() -> None:
    job = Job(1, epochs=1, samples=4)
    job.join("slow")
    job.attach("slow")
    job.round(["w0"])
    job.step(e.EvaluationReported(worker="w0", incarnation=1, version=1, epoch=1, metrics={}))
    job.ready("slow")
    assert job.assignments["slow"].finished


def test_an_epoch_whose_evaluator_is_lost_is_evaluated_in_the_next_round() -> None:
    job = Job(2, epochs=3, samples=16)
    job.round(["w0", "w1"])
    job.round(["w0", "w1"])
    assert job.assignments["w0"].evaluate_epoch == 1
    job.step(e.Left(worker="w0", incarnation=1, failed=True, reason="crashed"))
    job.push("w1")
    job.publish()
    assert job.assignments["w1"].evaluate_epoch == 1
    job.step(e.EvaluationReported(worker="w1", incarnation=1, version=3, epoch=1, metrics={"loss": 1.0}))
    assert [done.epoch for done in job.core.state.evaluations.done] == [1]


@pytest.mark.parametrize(("worker", "version", "epoch"), [("w1", 1, 1), ("w0", 2, 1), ("w0", 1, 3)])
def test_an_evaluation_that_was_not_asked_for_changes_nothing(worker: str, version: int, epoch: int) -> None:
    job = Job(2, epochs=3, samples=8)
    job.round(["w0", "w1"])
    before = state(job.core)
    job.step(
        e.EvaluationReported(
            worker=worker, incarnation=1, version=version, epoch=epoch, metrics={"loss": 1.0}
        )
    )
    assert state(job.core) == before
    assert "not asked for" in job.one(e.Note).text


def test_an_epochs_evaluation_is_asked_of_the_first_position_at_its_start() -> None:
    job = Job(2, epochs=2, samples=8)
    job.round(["w0", "w1"])
    assert [a.evaluate_epoch for a in job.assignments.values()] == [1, 0]


def test_a_member_that_hangs_while_it_loads_does_not_keep_the_job_from_ending() -> None:
    job = Job(1, epochs=1, samples=4)
    job.join("loads")
    job.attach("loads")
    job.round(["w0"])
    job.step(e.Left(worker="w0", incarnation=1, failed=False, reason="the script has ended"))
    assert job.phase() is Phase.FINISHING
    job.step(e.KeepAlive(worker="loads", incarnation=1, activity="loading", stalled_s=1e6))
    job.tick(0.25)
    assert job.all(e.Finish)


def test_scripts_hear_at_once_that_training_is_over() -> None:
    """They do not wait for the evaluation: the evaluator may wait for them in another job."""
    job = Job(core=core_of(epochs=1, min_workers=2, script=True), samples=8)
    job.bring("w0")
    job.bring("w1")
    job.join("slow")
    job.attach("slow")
    job.round(["w0", "w1"])
    told = job.assignments
    assert {worker: (a.trained, a.evaluate_epoch) for worker, a in told.items()} == {
        "w0": (True, 1),
        "w1": (True, 0),
    }
    assert not any(a.finished for a in told.values())
    job.ready("slow")
    assert (job.assignments["slow"].trained, job.assignments["slow"].version) == (True, 1)
    job.step(e.Left(worker="w0", incarnation=1, failed=True, reason="crashed"))
    assert job.assignments["w1"].evaluate_epoch == 1


@pytest.mark.parametrize("lost", [False, True])
def test_an_end_without_evaluation_is_a_warning_if_a_member_was_lost(lost: bool) -> None:
    job = Job(1, epochs=1, samples=4)
    job.round(["w0"])
    job.step(e.Left(worker="w0", incarnation=1, failed=lost, reason="x"))
    (note,) = [each for each in job.all(e.Note) if "no member is left" in each.text]
    assert note.warning == lost
    assert job.all(e.Finish)


def test_a_repeated_evaluation_counts_once() -> None:
    job = Job(1, epochs=2, samples=4)
    job.round(["w0"])
    for _ in range(2):
        job.step(e.EvaluationReported(worker="w0", incarnation=1, version=1, epoch=1, metrics={"loss": 1.0}))
    assert len(job.core.state.evaluations.done) == 1


def test_stopping_sends_everybody_home_and_takes_no_more_pushes() -> None:
    job = Job(2)
    job.step(e.Stopping(reason="maintenance"))
    job.push("w0")
    assert job.refused().reason is Reason.STOPPING
    job.step(e.Stopping(reason="maintenance"))
    assert {action.worker for action in job.all(e.Disconnect)} == {"w0", "w1"}
    assert all(action.refusal.reason is Reason.STOPPING for action in job.all(e.Disconnect))
    job.join("w3")
    assert job.refused().reason is Reason.STOPPING


def test_adaptive_local_steps_rise_as_the_rate_decays_and_begin_at_the_base_rate() -> None:
    """Formula (1), √((η₀/η) · (F/F₀)) · first, with the base rate as η₀. With the rate of the first round,
    which a warm-up makes next to nothing, there was one step for ever (finding F12)."""

    def steps(schedule: str, epochs: int) -> list[int]:
        core = core_of("local:first=4,most=16", epochs=epochs, schedule=schedule)
        job = Job(core=core, samples=64)
        job.bring("w0")
        found: list[int] = []
        while job.core.state.phase is Phase.RUNNING:
            found.append(int(job.core.mode.gauges["local_steps"]))
            job.round(["w0"])
        return found

    warm = steps("constant:warmup=1", 8)
    assert warm[0] == 4
    assert max(warm[1:3]) > 4  # the rate is below the base rate
    assert set(warm[len(warm) // 2 :]) == {4}
    decaying = steps("step:every=2,gamma=0.25", 8)
    assert decaying[0] == 4
    assert max(decaying) == 16
    assert decaying == sorted(decaying)


def test_an_epoch_is_evaluated_once_though_later_ones_have_been() -> None:
    """A member that comes back with an old assignment would be asked again, and its answer ignored."""
    job = Job(1)
    job.core.state.evaluations.done += [
        EpochStatus(epoch=epoch, version=epoch, metrics={}, seconds=1.0) for epoch in (1, 2)
    ]
    assert not job.core.state.evaluations.wants(1)
    assert not job.core.state.evaluations.wants(2)
    assert job.core.state.evaluations.wants(3)


def test_only_the_last_evaluations_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that never ends would grow with each, and every status would list them all."""
    monkeypatch.setattr("gradwire.server.job.evaluations.EVALUATIONS_REMEMBERED", 3)
    evaluations = Evaluations()
    for epoch in range(1, 6):
        evaluations.asked = Asked(by=("w", 1), epoch=epoch, version=epoch, asked_at=1.0, assignment=epoch)
        assert evaluations.report(("w", 1), epoch, epoch, {"loss": 1.0}, 0.0)
    assert [each.epoch for each in evaluations.done] == [3, 4, 5]
    assert [evaluations.wants(epoch) for epoch in (1, 2, 3, 5, 6)] == [False, False, False, False, True]
