"""Limits that end a job before its last epoch, and when it is evaluated."""

from __future__ import annotations

from typing import Any

import pytest
from jobs import Job
from stepping import copied, core_of

from gradwire.common.configuration import UsageError
from gradwire.common.spec import Length, SpecError
from gradwire.proto.messages import Phase, Welcome
from gradwire.server.checks import check
from gradwire.server.job import events as e
from gradwire.server.job.limits import EarlyStop
from gradwire.settings import ServerSettings, parse_evaluate_every


def job_of(workers: int = 1, **rules: Any) -> Job:
    """Rounds of 4 samples of each worker, 40 samples per epoch."""
    rules = {"batch_size": 4, "epochs": 3, "lease_seconds": 10.0, "min_workers": workers} | rules
    return Job(workers, core=core_of(**rules))


def evaluate(job: Job, **metrics: float) -> None:
    """Whoever was asked reports."""
    asked = job.core.state.evaluations.asked
    assert asked is not None
    name, incarnation = asked.by
    job.step(
        e.EvaluationReported(name, incarnation, version=asked.version, epoch=asked.epoch, metrics=metrics)
    )


# ---- steps, time


@pytest.mark.parametrize("overlap", ["backward", "both"])
def test_a_job_ends_with_the_step_that_it_was_told(overlap: str) -> None:
    job = job_of(2, max_steps=3, epochs=0, overlap=overlap)
    for _ in range(2):
        job.round(["w0", "w1"])
        assert job.phase() is Phase.RUNNING
    assert not any(assignment.next for assignment in job.assignments.values())
    job.round(["w0", "w1"])
    assert job.phase() is Phase.FINISHING
    assert "reached --max-steps 3" in job.one(e.Note).text
    assert (job.told["w0"].version, job.told["w0"].evaluate_epoch, job.told["w0"].ranges) == (3, 1, ())
    evaluate(job, loss=0.5)
    assert job.all(e.Finish)
    job.join("w9")
    assert job.refused().message == "the job has finished: reached --max-steps 3"


@pytest.mark.parametrize("restarted", [False, True])
def test_a_script_ends_the_job_with_an_evaluation(restarted: bool) -> None:
    job = job_of(2, epochs=50, script=True)
    job.round(["w0", "w1"])
    job.step(e.StopRequested("w1", 1, reason="good enough"))
    job.step(e.StopRequested("w1", 1, reason="said again on a new stream"))
    if restarted:
        job.core = copied(job.core, "sync")
    job.round(["w0", "w1"])
    assert job.phase() is Phase.FINISHING
    assert "good enough (asked for by rank 1 (w1))" in job.one(e.Note).text
    assert (job.told["w0"].version, job.told["w0"].evaluate_epoch) == (2, 1)
    assert job.told["w1"].trained
    evaluate(job, loss=0.5)
    assert job.all(e.Finish)
    job.step(e.StopRequested("w1", 1, reason="too late"))
    job.join("w9")
    assert "good enough" in job.refused().message


def test_the_best_values_are_the_jobs_and_reach_all_scripts() -> None:
    job = job_of(2, epochs=9, script=True, keep="best:score:min")
    for loss, score in ((0.5, 3.0), (0.7, 2.0), (0.4, 4.0)):
        while job.core.state.evaluations.asked is None:
            job.round(["w0", "w1"])
        evaluate(job, loss=loss, accuracy=loss, score=score)
        told = job.one(e.TellEvaluations).evaluations
        assert [each.metrics["loss"] for each in told.results] == [loss]
    expected = {"loss": 0.4, "accuracy": 0.7, "score": 2.0}
    assert told.best == expected
    job.core = copied(job.core, "sync")
    job.step(e.Detached("w1", 1))
    job.attach("w1")
    welcome = job.one(Welcome).evaluations
    assert welcome is not None
    assert welcome.best == expected
    assert [each.metrics["score"] for each in welcome.results] == [3.0, 2.0, 4.0]


def test_all_members_of_a_round_know_the_same_evaluations() -> None:
    job = job_of(2, epochs=9, script=True)
    while job.core.state.evaluations.asked is None:
        job.round(["w0", "w1"])
    evaluate(job, loss=0.5)
    assert {each.evaluations for each in job.told.values()} == {0}
    job.step(e.Detached("w1", 1))
    job.attach("w1")
    job.ready("w1")  # and is told its work again, after the evaluation
    assert job.assignments["w1"].evaluations == 0
    job.round(["w0", "w1"])
    assert {each.evaluations for each in job.assignments.values()} == {1}


def test_the_last_epoch_ends_it_where_that_comes_first() -> None:
    job = job_of(max_steps=11, epochs=1)
    for _ in range(10):
        job.round(["w0"])
    assert job.phase() is Phase.FINISHING
    assert job.told["w0"].evaluate_epoch == 1
    assert not job.core.state.stopped


@pytest.mark.parametrize("mode", ["async", "stale:bound=4"])
def test_workers_that_push_one_at_a_time_take_no_step_too_many(mode: str) -> None:
    job = job_of(3, max_steps=4, epochs=0, mode=mode)
    pushed = 0
    while job.phase() is Phase.RUNNING:
        for worker in ("w0", "w1", "w2"):
            if (work := job.core.state.roster.members[worker].work) is not None and not work.late:
                job.push(worker)
                pushed += 1
                while job.all(e.Apply):
                    job.publish()
        assert pushed <= 4
    assert (pushed, job.core.state.version) == (4, 4)


def test_time_ends_a_job_with_the_round_that_is_open() -> None:
    job = job_of(2, max_seconds=5.0)
    job.round(["w0", "w1"])
    job.tick(5.0)
    job.heartbeat("w0", "w1")
    assert job.phase() is Phase.RUNNING
    job.round(["w0", "w1"])
    assert (job.phase(), job.core.state.version) == (Phase.FINISHING, 2)


def test_time_ends_a_job_that_nobody_is_left_to_train() -> None:
    job = job_of(1, max_seconds=5.0)
    job.round(["w0"])
    job.step(e.Left(worker="w0", incarnation=1, failed=False, reason="done"))
    job.tick(6.0)
    job.bring("w1")
    assert job.phase() is Phase.FINISHING


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"epochs": 0}, "expected --max-steps or --max-seconds with it"),
        ({"epochs": 0, "max_seconds": 60.0, "schedule": "cosine"}, "cosine: it ends with the job"),
        ({"epochs": 0, "max_seconds": 60.0, "schedule": "step:every=10%"}, "it ends with the job"),
        ({"epochs": 0, "max_seconds": 60.0, "schedule": "constant:warmup=10%"}, "it ends with the job"),
    ],
)
def test_limits_that_do_not_go_together(rules: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check(ServerSettings(**rules))


# ---- evaluations


@pytest.mark.parametrize(
    ("every", "rounds", "numbers"),
    [
        ("1epoch", 25, {10: 1, 20: 2}),
        ("2epochs", 25, {20: 1}),
        ("4steps", 13, {4: 1, 8: 2, 12: 3}),
        ("0.5epochs", 12, {5: 1, 10: 2}),
        ("3s", 8, {3: 1, 6: 2}),  # a round takes one second
    ],
)
def test_evaluations_are_due_by_epochs_steps_or_time(
    every: str, rounds: int, numbers: dict[int, int]
) -> None:
    job = job_of(evaluate_every=every)
    found: dict[int, int] = {}
    for version in range(1, rounds + 1):
        job.now += 1.0
        job.round(["w0"])
        if number := job.assignments["w0"].evaluate_epoch:
            found[version] = number
            evaluate(job, loss=1.0)
    assert found == numbers


def test_the_last_version_is_evaluated_under_a_number_of_its_own() -> None:
    job = job_of(evaluate_every="5steps", max_steps=5)
    for _ in range(5):
        job.round(["w0"])
    evaluate(job, loss=1.0)
    assert [(done.epoch, done.version) for done in job.core.state.evaluations.done] == [(1, 5)]
    assert job.all(e.Finish)
    job = job_of(evaluate_every="4steps", max_steps=5)
    for _ in range(5):
        job.round(["w0"])
        if job.core.state.evaluations.asked is not None:
            evaluate(job, loss=1.0)
    assert [(done.epoch, done.version) for done in job.core.state.evaluations.done] == [(1, 4), (2, 5)]
    assert job.core.state.evaluations.done[0].epochs == pytest.approx(0.4)


@pytest.mark.parametrize("text", ["0", "0s", "1.5steps", "soon", "-1", "5 steps", "1epoch2"])
def test_lengths_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="expected a length"):
        parse_evaluate_every(text)


@pytest.mark.parametrize(
    ("text", "length"),
    [
        ("2", Length(2, "epochs")),
        ("1epoch", Length(1, "epochs")),
        ("1step", Length(1, "steps")),
        ("5min", Length(300, "seconds")),
        ("0.5h", Length(1800, "seconds")),
    ],
)
def test_lengths(text: str, length: Length) -> None:
    assert parse_evaluate_every(text) == length


# ---- stopping early


def test_a_job_that_gets_no_better_ends() -> None:
    job = job_of(early_stop="accuracy:patience=2", evaluate_every="1step", epochs=5)
    for accuracy in (0.5, 0.7, 0.6, 0.7):
        assert job.phase() is Phase.RUNNING
        job.round(["w0"])
        evaluate(job, accuracy=accuracy)
    job.round(["w0"])
    assert job.phase() is Phase.FINISHING
    assert "accuracy has not improved in 2 evaluations" in job.core.state.stopped
    evaluate(job, accuracy=0.7)
    assert job.all(e.Finish)
    assert job.core.state.version == 5


@pytest.mark.parametrize(
    ("values", "over"),
    [
        ([], False),
        ([1.0, 1.0], False),
        ([1.0, 1.0, 1.0], True),
        ([1.0, 2.0, 1.0, 1.5], True),
        ([1.0, 2.0, 2.05, 2.05], True),  # better by less than delta
        ([1.0, 0.5, 2.0, 1.0], False),
    ],
)
def test_patience(values: list[float], over: bool) -> None:
    assert EarlyStop(patience=2, delta=0.1).over(values) is over


def test_less_is_better_of_losses() -> None:
    job = job_of(early_stop="val_loss:patience=1", evaluate_every="1step", epochs=5)
    for loss in (3.0, 2.0, 1.0):
        job.round(["w0"])
        evaluate(job, val_loss=loss)
        assert not job.core.state.stopped
    job.round(["w0"])
    evaluate(job, val_loss=1.0)
    assert job.core.state.stopped


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("accuracy:patience=0", "1 to 1023 evaluations, got 0"),
        ("accuracy:patience=1024", "1 to 1023 evaluations, got 1024"),
        ("accuracy:delta=-1", "at least 0"),
        ("A", "lower case"),
    ],
)
def test_bad_words_about_stopping_early(text: str, words: str) -> None:
    from gradwire.server.job.limits import parse_early_stop

    with pytest.raises(SpecError, match=words):
        parse_early_stop(text)
