"""A worker without a compressor of its own takes the job's, and may insist on a preset."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from gradwire.common.configuration import UsageError
from gradwire.settings import JobTerms, WorkerSettings
from gradwire.worker.metrics import WorkerMetrics
from gradwire.worker.session.compression import check_preset, jobs_compressor


def terms(**given: Any) -> JobTerms:
    return JobTerms(id="j", work="gradients", **given)


def test_it_is_what_the_job_names_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    found, auto = jobs_compressor(terms(compressor="1bit:decay=0.9", preset="low-communication"))
    assert (found.text, auto) == ("1bit:decay=0.9", False)
    found, auto = jobs_compressor(terms(compressor="auto:compressor=topk/ratio=4"))
    assert (found.text, auto) == ("topk:ratio=4", True)
    assert [record.getMessage() for record in caplog.records] == [
        "compressor 1bit:decay=0.9, by --preset low-communication of the server",
        "compressor auto:compressor=topk/ratio=4, as the server says",
    ]


@pytest.mark.parametrize("spec", ["elsewhere", "elsewhere:ratio=4", "auto:compressor=elsewhere/ratio=4"])
def test_a_third_partys_code_is_not_loaded_because_a_server_names_it(
    monkeypatch: pytest.MonkeyPatch, spec: str
) -> None:
    def load(*given: Any) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr("gradwire.compressors.registry.parse_compressor", load)
    with pytest.raises(UsageError, match=f"'elsewhere' is not built in.* --compressor {spec}$"):
        jobs_compressor(terms(compressor=spec))


def test_a_worker_that_insists_on_a_preset_joins_no_other_job() -> None:
    wanted = WorkerSettings(server="localhost", preset="diloco")
    check_preset(wanted, terms(preset="diloco"))
    check_preset(WorkerSettings(server="localhost"), terms(preset="diloco"))
    with pytest.raises(UsageError, match=r"--preset diloco: job j has no preset; start the server with"):
        check_preset(wanted, terms())
    with pytest.raises(UsageError, match="job j has --preset sparse-sgd; start the server with"):
        check_preset(wanted, terms(preset="sparse-sgd"))


def test_bytes_are_counted_under_the_compressor_that_is_named_later() -> None:
    metrics = WorkerMetrics("")
    metrics.wire_up.inc(3)
    metrics.name_compressor("1bit")
    metrics.wire_up.inc(5)
    count = metrics.registry.get_sample_value
    labels = {"direction": "up", "compressor": "1bit"}
    assert count("gradwire_worker_wire_bytes_total", labels) == 5
    assert count("gradwire_worker_wire_bytes_total", {**labels, "compressor": "unattributed"}) == 3
