"""Arguments of `job.attach`, beside the terms of the job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gradwire.optim import muon
from gradwire.settings import JobTerms
from gradwire.worker.script.length import JobLength
from gradwire.worker.script.terms import (
    ScriptError,
    check_attached,
    check_model,
    check_optimizer,
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
    ("job", "clip_norm", "steps", "words"),
    [
        ({}, 0.0, "mine", "expected 'server' or 'local'"),
        ({}, 1.0, "server", "the job has 0; start gc-server with --clip-norm 1"),
        ({"clip_norm": 1.0}, 0.0, "local", "the job has 1; start gc-server with --clip-norm 0"),
        ({"clip_norm": 1.0}, 1.0, "local", "call torch.nn.utils.clip_grad_norm_ before"),
        ({"work": "local"}, 1.0, "server", "call torch.nn.utils.clip_grad_norm_ before"),
    ],
)
def test_what_does_not_go_with_the_job_is_refused(
    job: dict[str, Any], clip_norm: float, steps: str, words: str
) -> None:
    with pytest.raises(ScriptError, match=words):
        check_attached(terms(**job), script_work(terms(**job)), clip_norm, steps)


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
