"""Members that train on the same batches."""

from __future__ import annotations

from collections.abc import Iterable

from jobs import Job

from gradwire.server.job import events as e


def trained(job: Job, *steps: Iterable[int]) -> list[str]:
    """The warnings while the members, from the last one down, push gradients of these batches."""
    found: list[str] = []
    for step in steps:
        for number, batch in enumerate(step, start=1):
            job.push(f"w{2 - number}", batch=batch)
            found += [note.text for note in job.all(e.Note) if note.warning]
        job.publish()
    return found


def test_two_workers_that_draw_the_same_batches_are_named_once_with_the_remedy() -> None:
    (note,) = trained(Job(2), (7, 7), (8, 8), (9, 9), (10, 10), (11, 11))
    assert note.startswith("rank 0 (w0) and rank 1 (w1) train on the same batches")
    assert "rank=job.rank" in note


def test_the_same_batches_in_another_order_are_noticed_too() -> None:
    assert trained(Job(2), (7, 9), (8, 7), (9, 8))


def test_other_batches_few_equal_ones_one_content_and_unknown_ones_are_not_named() -> None:
    assert not trained(Job(2), (1, 2), (3, 4), (5, 6), (7, 8))
    assert not trained(Job(2), (1, 1), (2, 2), (5, 6), (7, 8))
    assert not trained(Job(2), *[(1, 1)] * 5)
    assert not trained(Job(2), *[(0, 0)] * 5)


def test_a_worker_that_is_gone_is_not_compared() -> None:
    job = Job(2)
    trained(job, (1, 11), (2, 12), (3, 13))
    job.step(e.Left(worker="w1", incarnation=1, reason="done", failed=False))
    for batch in (1, 2, 3):
        job.push("w0", batch=batch)
        assert not [note for note in job.all(e.Note) if note.warning]
        job.publish()
