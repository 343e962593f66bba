"""Scripts that accumulate gradients: a step takes as many batches as they say, or turn out to take."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
from jobs import LEASE_S, MODEL, Job
from stepping import core_of

from gradwire.proto.messages import Assignment, Phase, Range
from gradwire.proto.refusal import Reason
from gradwire.server.job import events as e

MODES = ("sync", "local:steps=2,correction=0", "async")


def job_of(mode: str = "sync", workers: int = 2, samples: int = 40, **rules: Any) -> Job:
    given = {"min_workers": workers, "batch_size": 4, "epochs": 1, "script": True, **rules}
    return Job(workers, core=core_of(mode, **given), samples=samples)


def spans(assignment: Assignment) -> list[tuple[int, int]]:
    return [(each.start, each.start + each.count) for each in assignment.ranges]


def declared(job: Job, worker: str, batches: int, **more: Any) -> None:
    job.join(worker)
    if job.one(e.Admission).initialize:
        job.attach(worker)
        job.initialize(worker)
    else:
        job.attach(worker)
    job.step(e.Prepared(worker, 1, fingerprint=MODEL, version=None, accumulate=batches, **more))


def test_a_round_is_extended_once_all_have_asked_in_whatever_order() -> None:
    found: set[tuple[Any, ...]] = set()
    for order in permutations(("w0", "w1", "w2")):
        job = job_of(workers=3)
        first = {worker: job.told[worker] for worker in order}
        for number, worker in enumerate(order):
            job.ask(worker)
            assert bool(job.assignments) == (number == 2)
        assert {worker: job.told[worker].id for worker in order} == {w: first[w].id for w in order}
        found.add(tuple((*spans(job.told[worker]), job.told[worker].batches) for worker in sorted(order)))
    assert found == {(((0, 4), (12, 16), (4, 4)), ((4, 8), (16, 20), (4, 4)), ((8, 12), (20, 24), (4, 4)))}


def test_one_that_has_stepped_is_not_waited_for_and_gets_nothing_more() -> None:
    job = job_of()
    job.push("w0", batches=1)
    job.ask("w1")
    assert spans(job.told["w1"]) == [(4, 12)]
    job.push("w1", batches=2)
    assert [each.samples for each in job.one(e.Apply).contributions] == [4, 8]


def take(job: Job, batches: int, workers: tuple[str, ...] = ("w0", "w1")) -> int:
    """Take a step of so many batches; return how often each worker has asked."""
    asked = 0
    while max(len(job.told[worker].batches) or 1 for worker in workers) < batches:
        for worker in workers:
            job.ask(worker)
        asked += 1
    for worker in workers:
        job.push(worker, batches=batches, samples=sum((job.told[worker].batches or (4,))[:batches]))
    job.publish()
    return asked


def test_the_number_of_batches_is_learned_and_steps_that_an_epoch_ends_teach_nothing() -> None:
    job = job_of(samples=8 * 14, epochs=2)
    assert [take(job, 3) for _ in range(4)] == [2, 2, 0, 0]
    assert job.core.state.version == 4
    assert list(job.told["w0"].batches) == [4, 4]  # the rest of the epoch
    assert take(job, 2) == 0
    assert job.core.state.epoch == 1
    assert list(job.told["w0"].batches) == [4, 4, 4]
    assert [take(job, 3) for _ in range(2)] == [0, 0]


def test_a_script_that_steps_earlier_than_expected_leaves_the_rest_to_the_next_round() -> None:
    job = job_of(samples=80)
    take(job, 2)
    take(job, 2)
    for worker in ("w0", "w1"):
        job.push(worker, batches=1, samples=4)
    assert job.core.state.samples.left == 80 - 32 - 8
    job.publish()
    assert sorted(spans(job.told["w0"]) + spans(job.told["w1"]))[0][0] == 40  # what was left out comes first


def test_a_declared_number_counts_from_the_first_step() -> None:
    core = core_of("sync", min_workers=2, batch_size=4, epochs=3, script=True)
    job = Job(core=core, samples=40)
    declared(job, "a", 2)
    declared(job, "b", 2)
    assert job.told["a"].batches == (4, 4)
    assert (job.told["a"].accumulate, job.told["a"].total_steps) == (2, 3 * 3)


def test_another_declared_number_is_refused_with_both_names() -> None:
    job = Job(core=core_of("sync", min_workers=2, batch_size=4, epochs=3, script=True), samples=40)
    declared(job, "a", 2)
    declared(job, "b", 3)
    refusal = job.refused()
    assert refusal.reason is Reason.MODEL
    assert (refusal.worker, refusal.value) == ("b", "3")
    assert refusal.limit == "2, as worker 'a' has declared"


@pytest.mark.parametrize("mode", MODES)
def test_gradients_that_an_epochs_end_leaves_over_make_no_version(mode: str) -> None:
    job = job_of(mode, workers=1, samples=8, epochs=2)
    for _ in range(2 if mode != "local:steps=2,correction=0" else 1):
        job.ask("w0")
    assert (job.core.state.version, job.core.state.epoch, job.core.state.samples.progress) == (0, 1, 1.0)
    job.step(e.EvaluationReported("w0", 1, version=0, epoch=1, metrics={}))
    for _ in range(2):
        if job.phase() is Phase.RUNNING:
            job.ask("w0")
    assert (job.phase(), job.core.state.version) == (Phase.FINISHING, 0)
    assert job.told["w0"].evaluate_epoch == 2


def test_local_steps_count_optimizer_steps_and_those_before_an_epochs_end_are_pushed() -> None:
    job = job_of("local:steps=2,correction=0", workers=1, samples=4 * 7, epochs=2)
    job.ask("w0", wanted=2, steps=1)  # after two batches, of which one step was made
    assert job.told["w0"].batches == (4, 4, 4, 4)
    assert job.told["w0"].steps == 2
    job.push("w0", batches=4, steps=2)
    job.publish()
    assert job.told["w0"].local_steps == 2
    job.ask("w0", steps=1)
    assert len(job.told["w0"].batches) == 3
    job.ask("w0", steps=1)
    assert job.told["w0"].exhausted
    job.push("w0", steps=1)
    assert job.one(e.Apply).version == 2
    job.publish()
    assert (job.told["w0"].epoch, job.told["w0"].local_steps) == (1, 3)


def test_a_member_that_asked_and_is_lost_leaves_its_samples_to_others_once() -> None:
    job = job_of()
    job.ask("w0")
    job.ask("w1")
    assert spans(job.told["w1"]) == [(4, 8), (12, 16)]
    job.step(e.Left("w1", 1, failed=True, reason="gone"))
    job.push("w0", batches=2)
    job.publish()
    assert job.told["w0"].ranges[0] == Range(start=4, count=4)
    assert job.core.state.samples.left == 40 - 8 - 4


def test_an_extension_that_was_lost_with_its_stream_is_sent_again_and_not_twice() -> None:
    job = job_of("async", workers=1)
    before = job.told["w0"]
    job.ask("w0")
    after = job.told["w0"]
    job.step(e.MoreWanted("w0", 1, assignment=before.id, batches=1))
    assert job.told["w0"] == after
    assert job.core.state.samples.left == 40 - 8


@pytest.mark.parametrize("rules", [{"overlap": "both"}, {"mode": "sync:redundancy=2"}])
def test_where_rounds_are_divided_before_they_begin_accumulation_has_to_be_declared(
    rules: dict[str, Any],
) -> None:
    job = job_of(**rules)
    job.ask("w0")
    assert "accumulate=N" in job.refused().remedy
    assert job.refused().worker == "w0"
    core = core_of(rules.get("mode", "sync"), min_workers=2, batch_size=4, epochs=1, script=True)
    job = Job(core=core, samples=40)
    declared(job, "a", 2)
    declared(job, "b", 2)
    assert len(job.told["a"].batches) == 2


def test_a_member_whose_pushes_are_all_empty_is_named() -> None:
    job = job_of("async", workers=1, samples=400)
    said: list[str] = []
    for _ in range(12):
        job.push("w0", samples=0)
        said += [each.text for each in job.all(e.Note) if each.warning]
        job.publish()
    assert said == [
        "rank 0 (w0) contributes nothing: its last 10 pushes had no gradient that counts; "
        "its own log says why"
    ]
    job = job_of("async", workers=1, samples=8)
    for _ in range(2):
        job.push("w0", samples=0)
        job.publish()
    assert any("its last 2 pushes" in each.text for each in job.all(e.Note))


def test_an_unknown_loss_is_no_zero() -> None:
    job = job_of("local:first=2,most=8,correction=0", samples=400)
    steps: list[int] = []
    for loss in (8.0, None, None, 2.0):
        job.push("w0", loss=loss)
        job.push("w1", loss=loss)
        assert {each.loss for each in job.one(e.Apply).contributions} == {loss}
        job.publish()
        steps.append(int(job.core.mode.gauges["local_steps"]))
    assert steps == [2, 2, 2, 1]  # at last after a fall of the loss to a quarter
    job = job_of("local:first=2,most=8,correction=0")
    job.push("w0", loss=None)
    said = [each.text for each in job.all(e.Note)]
    assert said == [
        "rank 0 (w0) does not know its training loss, so none is shown: its script can call "
        "job.log(loss=loss) before optimizer.step()"
    ]
    job.push("w1", loss=None)
    job.publish()
    assert job.core.mode.gauges["local_steps"] == 2


def test_a_backup_worker_that_waits_for_further_batches_gets_other_work_when_its_round_closes() -> None:
    core = core_of(
        min_workers=3, batch_size=4, epochs=2, lease_seconds=LEASE_S, mode="sync:backup=2", script=True
    )
    job = Job(3, min_workers=3, core=core)
    asked = job.told["w1"].id
    job.step(e.MoreWanted(worker="w1", incarnation=1, assignment=asked, batches=1))
    assert "w1" not in job.assignments
    job.push("w0")
    job.publish()
    assert job.told["w1"].id > asked
