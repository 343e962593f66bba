"""Arguments of `job.attach`, beside the terms of the job."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gradwire.optim import muon
from gradwire.proto import messages as m
from gradwire.settings import JobTerms
from gradwire.worker.script.length import JobLength
from gradwire.worker.script.terms import (
    ScriptError,
    check_attached,
    check_model,
    check_optimizer,
    epochs_of,
    overlaps,
    script_work,
)


def terms(**more: Any) -> JobTerms:
    fields: dict[str, Any] = {"id": "j", "work": "gradients", "script": True, **more}
    return JobTerms(**fields)


@pytest.mark.parametrize(
    ("job", "wished", "expected"),
    [
        *(("backward", None, True), ("backward", "backward", True), ("backward", "off", False)),
        *(("off", None, False), ("off", "off", False), ("both", None, False), ("both", "off", False)),
    ],
)
def test_a_script_may_do_without_the_jobs_overlap(job: Any, wished: str | None, expected: bool) -> None:
    assert overlaps(terms(overlap=job), wished) is expected


@pytest.mark.parametrize(
    ("job", "wished", "words"),
    [
        ("off", "backward", "the job has off; start gc-server with --overlap backward"),
        ("both", "backward", "the job has both; start"),
        ("backward", "both", "expected 'off', 'backward', or None for the job's"),
    ],
)
def test_more_overlap_than_the_jobs_is_refused(job: Any, wished: str, words: str) -> None:
    with pytest.raises(ScriptError, match=words):
        overlaps(terms(overlap=job), wished)


@pytest.mark.parametrize(
    ("of_job", "total", "start", "used", "expected"),
    [
        *((7, None, 0, "", 7), (7, 7, 0, "batches have begun", 7), (30, 5, 5, "", 5), (0, None, 9, "", 0)),
        (7, 5, 0, "", "the job has 7 epochs; start gc-server with --epochs 5, or leave out"),
        (0, 5, 0, "", "the job has 0 epochs"),
        (30, 0, 0, "", "expected a number of epochs, 1 or more"),
        (30, 5, 0, "job.total_steps was read", "was read with 30 epochs.* write epochs = job.epochs\\(5\\)"),
        (30, 5, 6, "", "expected 0 to 5, the job's number of epochs"),
        (7, None, -1, "", "expected 0 to 7"),
        (30, 20.0, 0, "", r"job.epochs\(20.0, start=0\): expected whole numbers"),
        (30, None, 2.5, "", r"start=2.5\): expected whole numbers"),
    ],
)
def test_the_number_of_epochs_is_the_scripts_where_nothing_contradicts_it(
    of_job: int, total: int | None, start: int, used: str, expected: int | str
) -> None:
    if isinstance(expected, int):
        assert epochs_of(of_job, total, start, used) == expected
        return
    with pytest.raises(ScriptError, match=expected):
        epochs_of(of_job, total, start, used)


@pytest.mark.parametrize(
    ("job", "clip_norm", "steps", "words"),
    [
        ({}, 0.0, "mine", "expected 'server' or 'local'"),
        ({"clip_norm": 2.0}, 1.0, "server", "was started with --clip-norm 2; leave that option out"),
        ({"clip_norm": 1.0}, 0.0, "local", "was started with --clip-norm 1; leave that option out"),
        ({"overlap": "both"}, 1.0, "server", "the job has --overlap both, which steps parts before"),
        ({}, -1.0, "server", "expected a number, 0 or more"),
        ({"clip_norm": 1.0}, 1.0, "local", "call torch.nn.utils.clip_grad_norm_ before"),
        ({"work": "local"}, 1.0, "server", "call torch.nn.utils.clip_grad_norm_ before"),
    ],
)
def test_what_does_not_go_with_the_job_is_refused(
    job: dict[str, Any], clip_norm: float, steps: str, words: str
) -> None:
    with pytest.raises(ScriptError, match=words):
        check_attached(terms(**job), script_work(terms(**job)), clip_norm, steps)


@pytest.mark.parametrize(
    ("work", "words"),
    [
        ("exchange", "a script cannot exchange coded packets; start the server with --mode sync"),
        ("local:delayed=on", "start the server without delayed=on"),
    ],
)
def test_work_that_a_script_cannot_do_is_refused(work: str, words: str) -> None:
    with pytest.raises(ScriptError, match=words):
        script_work(terms(work=work))


def test_an_optimizer_that_does_not_suit_the_preset_is_refused_by_name() -> None:
    model = torch.nn.Linear(4, 4)
    of_torch = torch.optim.SGD(model.parameters(), lr=0.1)
    check_optimizer(terms(preset="sparse-sgd"), of_torch)
    check_optimizer(terms(preset="low-communication"), muon(model, 0.1))
    check_optimizer(terms(), of_torch)
    for preset, optimizer in (("sparse-sgd", muon(model, 0.1)), ("low-communication", of_torch)):
        with pytest.raises(ScriptError, match=f"--preset {preset} expects"):
            check_optimizer(terms(preset=preset), optimizer)


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        ({"mode": "sync", "epochs": 0, "max_steps": 125}, 125),
        ({"mode": "local:steps=8,correction=0", "epochs": 0, "max_steps": 125}, 1000),
        ({"mode": "local:steps=8", "epochs": 3, "max_steps": 2, "batch_size": 4}, 16),
        ({"mode": "local:steps=8", "epochs": 3, "max_steps": 2000, "batch_size": 4}, 30),
    ],
)
def test_all_steps_are_local_ones_in_local_mode(job: dict[str, Any], expected: int) -> None:
    """Before the first batch, after which the server tells them."""
    length = JobLength(terms(**job), workers=2, single=False)
    length.samples = 80
    assert length.total_steps == expected


def test_all_steps_are_unknown_before_the_first_batch_if_rounds_differ() -> None:
    with pytest.raises(ScriptError, match="LambdaLR of job"):
        _ = JobLength(terms(mode="local", epochs=0, max_steps=9), workers=2, single=False).total_steps


def test_the_length_of_a_loop_tells_the_last_batch_also_if_a_member_is_lost() -> None:
    """Two members have 7 batches each of 103 samples. One is lost in the second round: the other computes its
    batch of this round, and all that follow."""
    length = JobLength(terms(batch_size=8), workers=2, single=False)
    length.declare("job.batches", 103, 0, begun=False)
    assert length.batches == 7
    rounds = [(0, 2), (16, 2), (16, 2), *((start, 1) for start in range(32, 103, 8))]
    for number, (settled, world) in enumerate(rounds):
        given = m.Assignment(
            id=1 + number, version=settled, epoch=2, world=world, progress=2 + settled / 103, accumulate=1
        )
        length.give(dataclasses.replace(given, ranges=(m.Range(start=0, count=8),)), 0)
        assert (length.batches == number + 1) is (number + 1 == len(rounds))
    assert length.batches == 12  # after the loop, too
    length.begin_loop()
    assert length.batches == 7


def test_the_length_of_a_loop_counts_the_batches_of_an_assignment() -> None:
    length = JobLength(terms(batch_size=8), workers=1, single=False)
    length.declare("job.batches", 40, 0, begun=False)
    found: list[int] = []
    for settled, batches in ((0, (8, 8)), (16, (8, 8)), (32, (8,))):
        given = m.Assignment(id=1, version=0, world=1, progress=settled / 40, batches=batches)
        for at in range(len(batches)):
            length.give(given, at)
            found.append(length.batches)
    assert found == [5] * 5


class DistributedDataParallel(nn.Module):
    """Has the name of torch's, which needs a process group."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


@pytest.mark.parametrize("wrap", [nn.Sequential, DistributedDataParallel])
def test_a_model_that_ddp_wraps_is_refused_with_what_to_attach(
    wrap: Callable[[nn.Module], nn.Module],
) -> None:
    inner = nn.Linear(2, 2)
    with pytest.raises(
        ScriptError, match=r"wrapped in DistributedDataParallel.*attach the module.*gradwire\.ddp"
    ):
        check_model(wrap(DistributedDataParallel(inner)))
    check_model(nn.Sequential(inner))
