"""Compare /metrics with the text of prometheus_client's own metrics, under variables of other programs."""

from pathlib import Path
from typing import Any

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, generate_latest, values

from gradwire.common.metrics import SECONDS, MetricSet, counter, gauge, histogram
from gradwire.server.metrics import ServerMetrics
from gradwire.worker.metrics import WorkerMetrics


class Some(MetricSet, prefix="some"):
    pushes = counter("pushes", "text", "direction", "name")
    rounds = counter("rounds", "text")
    loss = gauge("loss", 'text with "quotes"\n', "phase")
    version = gauge("version", "text")
    seconds = histogram("seconds", "text")


def both(ours: object, theirs: object) -> list[Any]:
    return [ours, theirs]


def test_the_exported_text_is_the_librarys() -> None:
    ours = Some()
    registry = CollectorRegistry()
    pushes = prometheus_client.Counter("some_pushes", "text", ("direction", "name"), registry=registry)
    rounds = prometheus_client.Counter("some_rounds", "text", registry=registry)
    loss = prometheus_client.Gauge("some_loss", 'text with "quotes"\n', ("phase",), registry=registry)
    version = prometheus_client.Gauge("some_version", "text", registry=registry)
    seconds = prometheus_client.Histogram("some_seconds", "text", buckets=SECONDS, registry=registry)
    for metric in both(ours.pushes, pushes):
        metric.labels("up", 'a"b\\\n')
        metric.labels("down", "x").inc()
        metric.labels("down", "x").inc(2.5)
    for metric in both(ours.rounds, rounds):
        metric.inc(3)
    for metric in both(ours.loss, loss):
        metric.labels("one").set(True)
        metric.labels("two").set(float("nan"))
    for metric in both(ours.version, version):
        metric.set(7)
    for metric in both(ours.seconds, seconds):
        for value in (0, 0.001, 0.3, 0.3, 1e9):
            metric.observe(value)

    def lines(registry: CollectorRegistry) -> list[str]:
        text = generate_latest(registry).decode().splitlines()
        return [line for line in text if "some_" in line and "_created" not in line]

    assert lines(ours.registry) == lines(registry)
    (one,) = ours.registry.restricted_registry(["some_version"]).collect()  # /metrics?name[]=
    assert one.name == "some_version"


@pytest.mark.parametrize("there", [True, False], ids=["a folder", "no folder"])
def test_values_are_this_jobs_where_other_programs_share_theirs_in_files(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With PROMETHEUS_MULTIPROC_DIR, prometheus_client's metrics go on from an earlier process's values."""
    folder = tmp_path / "shared" if there else tmp_path / "missing"
    (tmp_path / "shared").mkdir()
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(folder))
    # What the library does at its import; every process of a container is 1, so restarts share a name.
    untyped: Any = values
    monkeypatch.setattr(values, "ValueClass", untyped.MultiProcessValue(lambda: 1))
    for _ in range(2):
        server, worker = ServerMetrics("none"), WorkerMetrics("4bit")
        server.received(10)
        server.round_closed(0.5, 8, 0.5, 1)
        worker.pushes.labels("accepted").inc()
        up = {"direction": "up", "compressor": "unattributed"}
        assert server.registry.get_sample_value("gradwire_server_wire_bytes_total", up) == 10
        assert server.registry.get_sample_value("gradwire_server_round_seconds_count") == 1
        accepted = {"decision": "accepted"}
        assert worker.registry.get_sample_value("gradwire_worker_pushes_total", accepted) == 1
    assert not list((tmp_path / "shared").iterdir())


def test_wrong_uses_are_errors() -> None:
    metrics = Some()
    with pytest.raises(ValueError, match="only grows"):
        metrics.rounds.inc(-1)
    with pytest.raises(ValueError, match="labels"):
        metrics.pushes.labels("up")
