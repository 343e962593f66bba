"""Arguments of `job.attach`, beside the terms of the job."""

from __future__ import annotations

from typing import Any

import pytest

from gradwire.settings import JobTerms
from gradwire.worker.script.terms import ScriptError, check_attached, overlaps, script_work


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
