"""The training loop against a scripted connection: what is pushed, and what becomes of a refused gradient."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import numpy as np
import pytest
import torch
from scripted import JOB, REPLY, Script, updates
from torch import nn

from gradwire.compressors import LayerRule, decode, parse_compressor
from gradwire.proto import messages as m
from gradwire.proto.job import job_message
from gradwire.proto.refusal import Reason, Refusal, Refused
from gradwire.settings import JobTerms
from gradwire.worker.metrics import WorkerMetrics
from gradwire.worker.session.connection import Connection
from gradwire.worker.session.pushes import MAX_RESENDS
from gradwire.worker.session.receiving import Received
from gradwire.worker.session.replica import Replica
from gradwire.worker.tasks import Task
from gradwire.worker.tasks.computation import TaskFailedError
from gradwire.worker.tasks.trainer import Trainer

INPUTS = torch.randn(64, 6, generator=torch.Generator().manual_seed(2))


def task(loss_scale: float = 1.0) -> Task:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return torch.mean(torch.square(model(batch))) * loss_scale

    def evaluate(model: nn.Module) -> dict[str, float]:
        return {"accuracy": 0.25, "loss": float(model(INPUTS).square().mean())}

    return Task(
        name="t",
        train_samples=64,
        model=lambda: nn.Linear(6, 5),
        batch=lambda indices: INPUTS[indices],
        loss=loss,
        evaluate=evaluate,
    )


def assignment(version: int, *, samples: int = 4, **changes: Any) -> m.Assignment:
    """The only one at its version."""
    ranges = (m.Range(start=4 * version, count=samples),) if samples else ()
    fields: dict[str, Any] = {"id": version + 1, "version": version, "ranges": ranges, "world": 1}
    return m.Assignment(**{**fields, **changes})


def done(version: int) -> m.Assignment:
    return assignment(version, samples=0, finished=True)


def accepted(seq: int) -> m.Outcome:
    return m.Outcome(seq=seq, decision=m.Decision.ACCEPTED, version=seq)


def refused(seq: int, reason: Reason) -> m.Outcome:
    why = Refusal(reason=reason, message="no")
    return m.Outcome(seq=seq, decision=m.Decision.REFUSED, refusal=why)


def trainer(
    script: Script,
    compressor: str = "4bit",
    loss_scale: float = 1.0,
    of: Task | None = None,
    job: m.JobDescription = JOB,
) -> tuple[Trainer, Replica]:
    torch.manual_seed(1)
    chosen = of or task(loss_scale)
    replica = Replica(chosen.model(), chosen.train_samples)
    replica.adopt(replica.manifest.plan())
    return (
        Trainer(
            cast("Connection", script),
            dataclasses.replace(REPLY, job=job),
            chosen,
            replica,
            device=torch.device("cpu"),
            compressor=parse_compressor(compressor),
            rule=LayerRule(),
            metrics=WorkerMetrics(compressor),
        ),
        replica,
    )


def update(replica: Replica, version: int) -> Received:
    """An update that changes nothing but the version."""
    (received,) = updates(replica, version)
    return received


def sent(script: Script, seq: int) -> np.ndarray[Any, Any]:
    """Return a decoded push, all tensors in one."""
    return np.concatenate([decode(payload) for payload in script.pushed[seq - 1][1]])


@pytest.mark.parametrize("answer_first", [True, False])
def test_a_stale_push_goes_back_into_the_residual_whatever_is_heard_first(answer_first: bool) -> None:
    """After a slow upload the next assignment arrives before the refusal of the push that was too late."""
    script = Script()
    subject, replica = trainer(script)
    stale, onward = refused(1, Reason.STALE), [lambda: update(replica, 2), assignment(2)]
    heard = [stale, *onward] if answer_first else [*onward, stale]
    script.messages = [assignment(0), *heard, accepted(2), lambda: update(replica, 3), assignment(3), done(3)]
    subject.run()

    calm = Script()
    undisturbed, same = trainer(calm)
    calm.messages = [assignment(0), accepted(1), lambda: update(same, 2), assignment(2), accepted(2), done(2)]
    undisturbed.run()
    # What the refused push carried has joined the residual, or was sent with a later push.
    total = sum(sent(script, seq) for seq in range(2, 4)) + residual(subject)
    third = gradient_of(script, 3)
    expected = sum(sent(calm, seq) for seq in (1, 2)) + residual(undisturbed) + third
    np.testing.assert_allclose(total, expected, atol=1e-5)
    assert script.settled == [1]


def residual(subject: Trainer) -> np.ndarray[Any, Any]:
    return subject.session.compression.ledger.residual.numpy().copy()


def gradient_of(script: Script, seq: int) -> np.ndarray[Any, Any]:
    """The gradient behind a push, computed anew: the parameters do not change in these scripts."""
    alone = Script()
    subject, replica = trainer(alone, "none")
    version = script.pushed[seq - 1][0].base_version
    alone.messages = [lambda: update(replica, version), assignment(version), done(version)]
    subject.run()
    return sent(alone, 1)


def test_a_damaged_push_is_sent_again_but_not_for_ever() -> None:
    script = Script(assignment(0), *[refused(1, Reason.CHECKSUM)] * (MAX_RESENDS + 1))
    subject, _ = trainer(script)
    with pytest.raises(Refused):
        subject.run()
    assert script.resent == [(1, None)] * MAX_RESENDS


def test_a_step_without_a_finite_loss_contributes_nothing_and_ten_end_the_worker() -> None:
    script = Script()
    subject, replica = trainer(script, loss_scale=float("nan"))

    def updated(version: int) -> Any:
        return lambda: update(replica, version)

    for version in range(12):
        script.messages += [updated(version), assignment(version)]
    with pytest.raises(TaskFailedError, match="'weight' has an infinity or a NaN in 10 steps in a row"):
        subject.run()
    assert [header.samples for header, _ in script.pushed] == [0] * 10
    assert residual(subject).max() == 0


def test_rank_0_evaluates_when_it_is_told_to() -> None:
    script = Script(done(0))
    subject, _ = trainer(script)
    asked = assignment(0, evaluate_epoch=3)
    script.messages = [asked, asked, accepted(1), done(0)]
    subject.run()
    report, again = script.reports  # asked twice, done once
    assert again is report
    assert (report.epoch, report.version, report.metrics["accuracy"]) == (3, 0, 0.25)


def test_it_evaluates_without_computing_when_there_are_no_samples_and_waits_to_be_dismissed() -> None:
    script = Script(assignment(0, samples=0, evaluate_epoch=9), done(0))
    subject, _ = trainer(script)
    subject.run()
    assert [report.epoch for report in script.reports] == [9]
    assert script.pushed == []


def test_a_metric_that_is_not_finite_is_not_reported() -> None:
    script = Script(assignment(0, samples=0, evaluate_epoch=1), done(0))
    subject, replica = trainer(script)
    with torch.no_grad():
        replica.parameters[0].fill_(1e30)
    subject.run()
    assert script.reports[0].metrics == {"accuracy": 0.25}


def test_working_on_another_version_than_the_replicas_is_a_fault() -> None:
    script = Script()
    subject, replica = trainer(script)
    script.messages = [update(replica, 7), assignment(6)]
    with pytest.raises(RuntimeError, match="work at version 6, the replica is at 7"):
        subject.run()


def test_an_evaluation_that_is_no_mapping_is_said_to_be_none() -> None:
    script = Script(assignment(0, samples=0, evaluate_epoch=1))

    def three(model: nn.Module) -> Any:
        return 3

    broken = dataclasses.replace(task(), evaluate=three)
    subject, _ = trainer(script, of=broken)
    with pytest.raises(
        TaskFailedError, match="evaluate raised TypeError: expected a mapping of names to numbers"
    ):
        subject.run()


def test_a_step_that_is_held_back_pushes_nothing_and_the_last_ones_are_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    script = Script()
    subject, replica = trainer(script, "4bit:delay=2")
    script.messages = [
        assignment(0),
        accepted(1),
        lambda: update(replica, 1),
        assignment(1),
        accepted(2),
        lambda: update(replica, 2),
        assignment(2),
        accepted(3),
        done(3),
    ]
    with caplog.at_level("WARNING"):
        subject.run()
    assert [(header.samples, len(payloads)) for header, payloads in script.pushed] == [(0, 0), (4, 2), (0, 0)]
    assert "gradients of the last 1 steps were held back" in caplog.text


def test_what_is_drawn_follows_the_place_in_the_round() -> None:
    """Ranks are given anew when a worker comes back after its lease, and two could draw alike."""
    pushed: list[np.ndarray[Any, Any]] = []
    for position in (0, 1):
        script = Script()
        subject, _ = trainer(script, "qsgd:bits=2")
        script.messages = [assignment(0, position=position, world=2), done(0)]
        subject.run()
        pushed.append(sent(script, 1))
    assert not np.array_equal(pushed[0], pushed[1])


# ---- leaving


def leaving(subject: Trainer) -> Any:
    """The answer to the first push, and the worker is told to stop before it comes."""

    def answer() -> m.Outcome:
        subject.session.leave()
        return accepted(1)

    return answer


def test_a_worker_that_holds_nothing_back_leaves_at_once() -> None:
    script = Script(assignment(0), accepted(1))
    subject, _ = trainer(script, "none")
    script.messages = [assignment(0), leaving(subject)]
    assert subject.run() is False
    assert len(script.pushed) == 1


def test_who_leaves_does_not_evaluate_any_more() -> None:
    script = Script()
    subject, _ = trainer(script, "4bit")
    script.messages = [assignment(0), leaving(subject), assignment(0, id=2, evaluate_epoch=1), accepted(2)]
    assert subject.run() is False
    assert script.reports == []


@pytest.mark.parametrize(
    ("optimizer", "compressor", "warned"),
    [
        ("adamw:beta1=0.5", "topk:ratio=8,momentum=0.9", True),
        ("adam:beta1=0", "dgc", False),
        ("sgd:momentum=0.9", "dgc:momentum=0", False),
    ],
)
def test_momentum_at_both_ends_is_warned_of(
    caplog: pytest.LogCaptureFixture, optimizer: str, compressor: str, warned: bool
) -> None:
    job = job_message(JobTerms(id="j", work="gradients", batch_size=4, epochs=9, optimizer=optimizer))
    trainer(Script(), compressor, job=job)
    assert ("momentum is applied twice" in caplog.text) == warned
