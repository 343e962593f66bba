"""Which version is the best (`server/job/keeping`)."""

from __future__ import annotations

import pytest
from jobs import Job
from stepping import core_of

from gradwire.server.job import events as e
from gradwire.server.job.best_policy import Keep, parse_keep


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        ("best:accuracy", Keep("accuracy", False)),
        ("best:loss", Keep("loss", True)),
        ("best:validation_loss", Keep("validation_loss", True)),
        ("best:perplexity", Keep("perplexity", True)),
        ("best:loss:max", Keep("loss", False)),
        ("best:a:b:min", Keep("a:b", True)),
        ("best:a:b", Keep("a:b", False)),
    ],
)
def test_a_metric_and_a_direction_are_named(text: str, expected: Keep | None) -> None:
    assert parse_keep(text) == expected


@pytest.mark.parametrize("text", ["best", "best:", "best::min", "last:loss", "accuracy"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected best:METRIC"):
        parse_keep(text)


def test_the_first_of_the_best_is_kept() -> None:
    job = Job(1, core=core_of(min_workers=1, batch_size=4, epochs=6, keep="best:accuracy"), samples=4)
    kept: list[int] = []
    notes: list[str] = []
    for epoch, accuracy in enumerate((0.5, 0.4, 0.7, 0.7, None, 0.8), start=1):
        job.push("w0")
        job.publish()
        asked = job.told["w0"]
        assert asked.evaluate_epoch == epoch
        metrics = {"loss": 1.0} if accuracy is None else {"accuracy": accuracy}
        job.step(
            e.EvaluationReported(
                worker="w0", incarnation=1, version=asked.version, epoch=epoch, metrics=metrics
            )
        )
        kept += [best.epoch for best in job.all(e.Best)]
        notes += [note.text for note in job.all(e.Note) if note.warning]
    assert kept == [1, 3, 6]
    assert notes == ["--keep best:accuracy: no metric 'accuracy' in the evaluation, which has: loss"]
